// From a file's blocks to tiles of sixteen rows, and back to values for the embedding.
#include "pack.h"
#include <cstring>

namespace paceline {
namespace {

uint16_t u16(const uint8_t* p) { uint16_t x; memcpy(&x, p, 2); return x; }

uint16_t float_to_half(float f) {  // exact for the values it is used on, else rounded towards zero
    uint32_t x;
    memcpy(&x, &f, 4);
    const uint16_t sign = (x >> 16) & 0x8000;
    const int exponent = int((x >> 23) & 255) - 112;
    const uint32_t mantissa = x & 0x7FFFFF;
    if (exponent >= 31) return sign | 0x7BFF;
    if (exponent > 0) return sign | uint16_t(exponent << 10) | uint16_t(mantissa >> 13);
    if (exponent < -10) return sign;
    return sign | uint16_t((mantissa | 0x800000) >> (14 - exponent));
}

// One block of 32 columns of one row.
struct Columns {
    uint8_t q[BLOCK];
    uint16_t d = 0, m = 0;       // halves
    uint8_t scale = 0, low = 0;  // K4, K5: scale and minimum; K6: the two signed scales
};

void nibbles16(const uint8_t* p, uint8_t* q) {
    for (int i = 0; i < 16; ++i) { q[i] = p[i] & 15; q[i + 16] = p[i] >> 4; }
}
void fifth32(const uint8_t* p, uint8_t* q) {
    uint32_t bits;
    memcpy(&bits, p, 4);
    for (int i = 0; i < 32; ++i) q[i] |= ((bits >> i) & 1) << 4;
}
void six_bits(const uint8_t* s, int j, uint8_t& scale, uint8_t& low) {
    if (j < 4) { scale = s[j] & 63; low = s[j + 4] & 63; }
    else { scale = (s[j + 4] & 15) | ((s[j - 4] >> 6) << 4); low = (s[j + 4] >> 4) | ((s[j] >> 6) << 4); }
}

void read_block(int source, const uint8_t* row, int64_t b, Columns& c) {
    const uint8_t* p;
    switch (source) {
        case Q4_0: p = row + b * 18; c.d = u16(p); c.m = float_to_half(-8 * half_to_float(c.d)); nibbles16(p + 2, c.q); break;
        case Q4_1: p = row + b * 20; c.d = u16(p); c.m = u16(p + 2); nibbles16(p + 4, c.q); break;
        case Q5_0: p = row + b * 22; c.d = u16(p); c.m = float_to_half(-16 * half_to_float(c.d)); nibbles16(p + 6, c.q); fifth32(p + 2, c.q); break;
        case Q5_1: p = row + b * 24; c.d = u16(p); c.m = u16(p + 2); nibbles16(p + 8, c.q); fifth32(p + 4, c.q); break;
        case Q8_0: p = row + b * 34; c.d = u16(p); for (int i = 0; i < 32; ++i) c.q[i] = p[2 + i] ^ 0x80; break;
        case Q4_K: case Q5_K: {
            const bool five = source == Q5_K;
            p = row + b / 8 * (five ? 176 : 144);
            const int j = b % 8;
            c.d = u16(p); c.m = u16(p + 2);
            six_bits(p + 4, j, c.scale, c.low);
            const uint8_t* qs = p + (five ? 48 : 16) + 32 * (j / 2);
            for (int i = 0; i < 32; ++i) c.q[i] = j % 2 ? qs[i] >> 4 : qs[i] & 15;
            if (five) for (int i = 0; i < 32; ++i) c.q[i] |= ((p[16 + i] >> j) & 1) << 4;
            break;
        }
        default: {  // Q6_K
            p = row + b / 8 * 210;
            const int j = b % 8, half = j / 4, part = j % 4;
            const uint8_t* ql = p + 64 * half + 32 * (part % 2);
            const uint8_t* qh = p + 128 + 32 * half;
            for (int i = 0; i < 32; ++i) c.q[i] = (part < 2 ? ql[i] & 15 : ql[i] >> 4) | (((qh[i] >> (2 * part)) & 3) << 4);
            c.scale = p[192 + 2 * j]; c.low = p[192 + 2 * j + 1];
            c.d = u16(p + 208);
        }
    }
}

void put16(uint8_t* p, int lane, uint16_t x) { memcpy(p + 2 * lane, &x, 2); }

// Put one row's block into lane `lane` of a tile's block at p (scales included).
void write_block(int kind, uint8_t* p, int lane, const Columns& c) {
    if (kind == W4 || kind == W5) { put16(p, lane, c.d); put16(p + 32, lane, c.m); p += 64; }
    else if (kind == W8) { put16(p, lane, c.d); p += 32; }
    else { p[lane] = c.scale; p[16 + lane] = c.low; p += 32; }
    for (int i = 0; i < BLOCK; ++i) {
        const int group = i / 4, byte = 4 * lane + i % 4;
        if (kind == W8) { p[64 * group + byte] = c.q[i]; continue; }
        p[64 * (group % 4) + byte] |= (c.q[i] & 15) << (group < 4 ? 0 : 4);
        if (kind == W5 || kind == K5) p[256 + byte] |= ((c.q[i] >> 4) & 1) << group;
        if (kind == K6) p[256 + 64 * (group / 4) + byte] |= (c.q[i] >> 4) << (2 * (group % 4));
    }
}

}  // namespace

int kind_of(int source) {
    switch (source) {
        case Q4_0: case Q4_1: return W4;
        case Q5_0: case Q5_1: return W5;
        case Q8_0: return W8;
        case Q4_K: return K4;
        case Q5_K: return K5;
        default: return K6;
    }
}

size_t row_bytes(int source, int64_t columns) {
    const int64_t blocks = columns / BLOCK;
    switch (source) {
        case Q4_0: return blocks * 18;
        case Q4_1: return blocks * 20;
        case Q5_0: return blocks * 22;
        case Q5_1: return blocks * 24;
        case Q8_0: return blocks * 34;
        case Q4_K: return blocks / 8 * 144;
        case Q5_K: return blocks / 8 * 176;
        default: return blocks / 8 * 210;
    }
}

void pack_rows(int source, const uint8_t* raw, int64_t rows, int64_t columns, uint8_t* out) {
    const int kind = kind_of(source);
    const size_t tile = tile_bytes(kind, columns), stride = row_bytes(source, columns), step = block_bytes(kind);
    memset(out, 0, (rows + LANES - 1) / LANES * tile);
    for (int64_t row = 0; row < rows; ++row) {
        uint8_t* p = out + row / LANES * tile;
        const int lane = row % LANES;
        for (int64_t b = 0; b < columns / BLOCK; ++b) {
            Columns c;
            read_block(source, raw + row * stride, b, c);
            if (is_super(kind) && b % SUPER == 0) {
                put16(p, lane, c.d);
                if (kind != K6) put16(p + 32, lane, c.m);
                p += super_bytes(kind);
            }
            write_block(kind, p, lane, c);
            p += step;
        }
    }
}

void pack_dense(int kind, const uint8_t* values, int64_t rows, int64_t columns, uint8_t* out) {
    const size_t tile = tile_bytes(kind, columns), size = kind == F32 ? 4 : 2;
    memset(out, 0, (rows + LANES - 1) / LANES * tile);
    for (int64_t row = 0; row < rows; ++row) {
        uint8_t* p = out + row / LANES * tile + row % LANES * size;
        for (int64_t c = 0; c < columns; ++c, values += size) memcpy(p + c * LANES * size, values, size);
    }
}

void read_row(int kind, const uint8_t* p, int lane, int64_t columns, float* out) {
    auto half = [&](const uint8_t* at) { return half_to_float(u16(at + 2 * lane)); };
    if (is_dense(kind)) {
        for (int64_t c = 0; c < columns; ++c) {
            if (kind == F32) memcpy(out + c, p + 4 * (c * LANES + lane), 4);
            else if (kind == F16) out[c] = half(p + 2 * c * LANES);
            else { const uint32_t bits = uint32_t(u16(p + 2 * (c * LANES + lane))) << 16; memcpy(out + c, &bits, 4); }
        }
        return;
    }
    float d = 0, m = 0;
    for (int64_t b = 0; b < columns / BLOCK; ++b) {
        if (is_super(kind) && b % SUPER == 0) { d = half(p); m = kind == K6 ? 0 : half(p + 32); p += super_bytes(kind); }
        const uint8_t* s = p;
        const uint8_t* q = p + (kind == W4 || kind == W5 ? 64 : 32);
        for (int i = 0; i < BLOCK; ++i) {
            const int group = i / 4, byte = 4 * lane + i % 4;
            int value = kind == W8 ? q[64 * group + byte] : (q[64 * (group % 4) + byte] >> (group < 4 ? 0 : 4)) & 15;
            if (kind == W5 || kind == K5) value |= ((q[256 + byte] >> group) & 1) << 4;
            if (kind == K6) value |= ((q[256 + 64 * (group / 4) + byte] >> (2 * (group % 4))) & 3) << 4;
            float x;
            if (kind == W4 || kind == W5) x = half(s) * float(value) + half(s + 32);
            else if (kind == W8) x = half(s) * float(value - 128);
            else if (kind == K6) x = d * float(int8_t(s[(i < 16 ? 0 : 16) + lane])) * float(value - 32);
            else x = d * float(s[lane]) * float(value) - m * float(s[16 + lane]);
            out[b * BLOCK + i] = x;
        }
        p += block_bytes(kind);
    }
}

}  // namespace paceline
