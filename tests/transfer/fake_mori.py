"""The Python that amd-mori 1.2.4 shows (`mori.io`), over plain memory: the same names, arguments and results."""

from __future__ import annotations

import ctypes
import json
from enum import Enum


class BackendType(Enum):
    RDMA = 2


class MemoryLocationType(Enum):
    CPU = 1


class StatusCode(Enum):
    INIT = 0
    SUCCESS = 1
    IN_PROGRESS = 2
    ERR_RDMA_OP = 21


class IOEngineConfig:
    def __init__(self, host: str = "", port: int = 0) -> None:
        self.host, self.port = host, port


class RdmaBackendConfig:
    def __init__(
        self,
        qp_per_transfer: int = 1,
        post_batch_size: int = -1,
        num_worker_threads: int = 1,
        poll_cq_mode: object = None,
        enable_notification: bool = True,
    ) -> None:
        self.qp_per_transfer = qp_per_transfer


class _Packed:
    def __init__(self, **fields: object) -> None:
        self.__dict__.update(fields)

    def pack(self) -> bytes:
        return json.dumps(self.__dict__).encode()

    @classmethod
    def unpack(cls, packed: bytes) -> _Packed:
        return cls(**json.loads(packed))


class EngineDesc(_Packed):
    pass


class MemoryDesc(_Packed):
    pass


class TransferStatus:
    def __init__(self, code: StatusCode) -> None:
        self._code, self.looks = code, 0

    def Code(self) -> StatusCode:
        return self._code

    def Message(self) -> str:
        return "remote access error" if self.Failed() else ""

    def InProgress(self) -> bool:
        return self._code is StatusCode.IN_PROGRESS

    def Succeeded(self) -> bool:
        self.looks += 1
        if self.looks == 3 and self.InProgress():  # as a completion queue would say it, some looks later
            self._code = StatusCode.SUCCESS
        return self._code is StatusCode.SUCCESS

    def Failed(self) -> bool:
        return self._code is StatusCode.ERR_RDMA_OP


class IOEngineSession:
    fail = False  # set by tests: the next batch fails half way

    def __init__(self, local: MemoryDesc, remote: MemoryDesc) -> None:
        self._local, self._remote, self._uid = local, remote, 0

    def allocate_transfer_uid(self) -> int:
        self._uid += 1
        return self._uid

    def batch_write(self, local: list[int], remote: list[int], sizes: list[int], uid: int) -> TransferStatus:
        return self._move(self._remote, remote, self._local, local, sizes)

    def batch_read(self, local: list[int], remote: list[int], sizes: list[int], uid: int) -> TransferStatus:
        return self._move(self._local, local, self._remote, remote, sizes)

    def _move(self, to: MemoryDesc, at: list[int], source: MemoryDesc, start: list[int], sizes: list[int]):  # type: ignore[no-untyped-def]
        failing, IOEngineSession.fail = IOEngineSession.fail and len(sizes) > 1, False
        for a, b, size in list(zip(at, start, sizes, strict=True))[: len(sizes) // 2 if failing else None]:
            assert a + size <= to.size and b + size <= source.size
            ctypes.memmove(to.ptr + a, source.ptr + b, size)
        return TransferStatus(StatusCode.ERR_RDMA_OP if failing else StatusCode.IN_PROGRESS)


class IOEngine:
    def __init__(self, key: str, config: IOEngineConfig) -> None:
        self._key, self._config, self._backends = key, config, []

    def create_backend(self, kind: BackendType, config: RdmaBackendConfig | None = None) -> None:
        self._backends.append(kind)

    def get_engine_desc(self) -> EngineDesc:
        return EngineDesc(key=self._key, host=self._config.host, port=4791)

    def register_remote_engine(self, desc: EngineDesc) -> None:
        self._peer = desc.key

    def register_memory(self, ptr: int, size: int, device_id: int, mem_loc: MemoryLocationType) -> MemoryDesc:
        assert self._backends and mem_loc is MemoryLocationType.CPU and device_id == -1
        return MemoryDesc(key=self._key, ptr=ptr, size=size)

    def deregister_memory(self, desc: MemoryDesc) -> None:
        assert desc.key == self._key

    def create_session(self, local: MemoryDesc, remote: MemoryDesc) -> IOEngineSession | None:
        return IOEngineSession(local, remote) if remote.key == self._peer else None
