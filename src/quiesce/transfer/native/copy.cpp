// Copies page lists between two mapped pools. No Python in it: called by ctypes, which gives up the GIL.
// Stores go past the cache: a pool is larger than any cache, and what lands is read by another process, later.

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace {

void copy_page(char* to, const char* from, int64_t bytes) {
#if defined(__SSE2__)
    constexpr int64_t line = 64;
    if (reinterpret_cast<uintptr_t>(to) % sizeof(__m128i) == 0) {
        for (; bytes >= line; bytes -= line, to += line, from += line) {
            const auto* in = reinterpret_cast<const __m128i*>(from);
            auto* out = reinterpret_cast<__m128i*>(to);
            const __m128i a = _mm_loadu_si128(in), b = _mm_loadu_si128(in + 1);
            const __m128i c = _mm_loadu_si128(in + 2), d = _mm_loadu_si128(in + 3);
            _mm_stream_si128(out, a);
            _mm_stream_si128(out + 1, b);
            _mm_stream_si128(out + 2, c);
            _mm_stream_si128(out + 3, d);
        }
    }
#endif
    std::memcpy(to, from, static_cast<size_t>(bytes));
}

}  // namespace

extern "C" {

__attribute__((visibility("default"))) int64_t quiesce_copy_abi() { return 1; }

// Page src[i] of `from` to page dst[i] of `to`, in order; pages of `bytes` bytes, all inside the pools: the caller has
// checked. When it returns, every store is visible to whoever is told of it.
__attribute__((visibility("default"))) void quiesce_copy_pages(char* to, const char* from, const int32_t* dst,
                                                               const int32_t* src, int64_t count, int64_t bytes) {
    for (int64_t i = 0; i < count; i++) copy_page(to + dst[i] * bytes, from + src[i] * bytes, bytes);
#if defined(__SSE2__)
    _mm_sfence();
#endif
}
}
