// write_kv on the CPU. The meaning is that of `write_kv` in api.py and of `quantise`.
#include <algorithm>
#include <cmath>

#include "../vectors.h"

// Mirrored by `_Arguments` in cpu.py. Strides count elements; caches and scales are contiguous.
struct Arguments {
    const void* key;
    const void* value;
    void* key_cache;
    void* value_cache;
    float* key_scales;    // or null
    float* value_scales;  // or null
    const int64_t* slots;
    int64_t key_row, key_head, value_row, value_head;
    int64_t num_rows, num_heads, dim, num_slots;
    int64_t row_type, cache_type;  // 0 fp32, 1 bf16, 2 fp16, 3 int8, 4 e4m3fn
};

namespace {

constexpr int64_t SIZES[] = {4, 2, 2, 1, 1};
constexpr int64_t MAX_DIM = 256;

template <typename E>
void widen(const typename E::type* p, int64_t dim, float* out) {
    int64_t d = 0;
    for (; d + LANES <= dim; d += LANES) store(out + d, E::read(p + d));
    if (d < dim) {
        typename E::type tail[LANES] = {};
        float wide[LANES];
        memcpy(tail, p + d, (dim - d) * sizeof *tail);
        store(wide, E::read(tail));
        memcpy(out + d, wide, (dim - d) * sizeof *out);
    }
}

void widen(const void* rows, int64_t at, int64_t type, int64_t dim, float* out) {
    switch (type) {
        case 0: return widen<Fp32>((const float*)rows + at, dim, out);
        case 1: return widen<Bf16>((const uint16_t*)rows + at, dim, out);
        default: return widen<Fp16>((const uint16_t*)rows + at, dim, out);
    }
}

// Bits of the e4m3 number nearest to |x| <= 448, ties to even.
uint8_t to_e4m3(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    const uint32_t sign = bits >> 24 & 0x80u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude < 0x3c800000u)  // below 2^-6: a multiple of 2^-9
        return (uint8_t)(sign | (uint32_t)std::nearbyint(std::fabs(x) * 512.0f));
    return (uint8_t)(sign | (((magnitude + 0x7ffffu + (magnitude >> 20 & 1)) >> 20) - (120u << 3)));
}

// The scale of one head and its numbers.
float quantise(const float* x, int64_t dim, bool is_fp8, void* out) {
    const float limit = is_fp8 ? 448.0f : 127.0f;
    float largest = 0.0f;
    bool finite = true;
    for (int64_t d = 0; d < dim; ++d) {
        finite &= std::isfinite(x[d]);
        largest = std::max(largest, std::fabs(x[d]));
    }
    const float scale = finite ? largest / limit : NAN;
    if (!(scale > 0.0f)) {
        memset(out, 0, dim);
        return scale;
    }
    for (int64_t d = 0; d < dim; ++d) {
        const float ratio = std::min(std::max(x[d] / scale, -limit), limit);
        if (is_fp8) ((uint8_t*)out)[d] = to_e4m3(ratio);
        else ((int8_t*)out)[d] = (int8_t)std::nearbyint(ratio);
    }
    return scale;
}

void write(const Arguments& a, const void* rows, int64_t row_stride, int64_t head_stride,
           void* cache, float* scales) {
    const int64_t size = SIZES[a.cache_type];
    for (int64_t row = 0; row < a.num_rows; ++row) {
        for (int64_t head = 0; head < a.num_heads; ++head) {
            const int64_t at = row * row_stride + head * head_stride;
            const int64_t place = a.slots[row] * a.num_heads + head;
            char* out = (char*)cache + place * a.dim * size;
            if (a.row_type == a.cache_type) {
                memcpy(out, (const char*)rows + at * size, a.dim * size);
            } else if (a.cache_type == 0) {
                widen(rows, at, a.row_type, a.dim, (float*)out);
            } else {
                float wide[MAX_DIM];
                widen(rows, at, a.row_type, a.dim, wide);
                scales[place] = quantise(wide, a.dim, a.cache_type == 4, out);
            }
        }
    }
}

}  // namespace

// The first row whose slot is not in the cache, or -1 once everything is written.
extern "C" int64_t specdec_write_kv(const Arguments* a) {
    for (int64_t row = 0; row < a->num_rows; ++row)
        if (a->slots[row] < 0 || a->slots[row] >= a->num_slots) return row;
    write(*a, a->key, a->key_row, a->key_head, a->key_cache, a->key_scales);
    write(*a, a->value, a->value_row, a->value_head, a->value_cache, a->value_scales);
    return -1;
}
