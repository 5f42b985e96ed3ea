"""Builds the native step, one library for each instruction-set level of this architecture, and the native copy of the
mover; no Python in either.

Where there is no C++ compiler the installation goes on without them, and engines say what they run instead.
"""

from __future__ import annotations

import copy
import os
import platform
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

FOLDER = "src/quiesce/engine/native"
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma", "-mbmi2"]
# Names as in quiesce/engine/native/library.py, which knows the CPU flags that each needs.
LEVELS: dict[str, list[str]] = {"base": []}
if platform.machine() in ("x86_64", "AMD64"):
    LEVELS |= {"avx512bf16": [*AVX512, "-mavx512bf16"], "avx512": AVX512, "avx2": ["-mavx2", "-mfma", "-mbmi2"]}
# No contraction: what is fused is written so, and rounds the same wherever it is inlined.
FLAGS = [
    "-std=c++17",
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fvisibility=hidden",
    "-pthread",
    "-Wall",
    "-g0",
]
FLAGS += ["-Wno-uninitialized", "-Wno-maybe-uninitialized"]  # GCC 12 warns of its own AVX-512 headers


class Build(build_ext):
    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()

    def build_extension(self, ext: Extension) -> None:
        own = copy.copy(self)  # all are made from one source: their objects must not meet in one folder
        own.build_temp = str(Path(self.build_temp, ext.name))
        super(Build, own).build_extension(ext)

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"  # called by ctypes: for any Python


class Wheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(
            f"quiesce.engine.native._{level}",
            [f"{FOLDER}/step.cpp"],
            depends=[str(path) for path in sorted(Path(FOLDER).glob("*.h"))],
            extra_compile_args=FLAGS + flags,
            extra_link_args=["-pthread"],
            language="c++",
            optional=True,
        )
        for level, flags in LEVELS.items()
    ]
    + [
        Extension(
            "quiesce.engine.native._decode",
            [f"{FOLDER}/decode.cpp"],
            depends=[str(path) for path in sorted(Path(FOLDER).glob("*.h"))],
            extra_compile_args=FLAGS,
            language="c++",
            optional=True,
        ),
        Extension(
            "quiesce.transfer.native._copy",
            ["src/quiesce/transfer/native/copy.cpp"],
            extra_compile_args=FLAGS,
            language="c++",
            optional=True,
        ),
    ],
    cmdclass={"build_ext": Build, "bdist_wheel": Wheel},
)
