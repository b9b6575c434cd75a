/* What the kernels are made of: a vector of floats, and the *tile*, a small matrix product that stays in registers.

       x  [rows][depth]  ·  w  [depth][columns]   ->   y  [rows][columns]

   Each weight that is loaded is multiplied with all rows of the tile, and each sum stays in a register from the first
   weight to the last: 6 rows of two vectors take 12 of AVX2's 16 registers, 12 rows 24 of AVX-512's 32. */
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef _OPENMP
#include <omp.h>
#else
static inline int omp_get_num_threads(void) { return 1; }
static inline int omp_get_thread_num(void) { return 0; }
static inline void omp_set_num_threads(int num_threads) { (void)num_threads; }
#endif

#ifdef __AVX512F__
#define LANES 16      /* floats in a vector */
#define TILE_ROWS 12
#else
#define LANES 8       /* where there is no AVX2, GCC makes two vectors of it, or eight numbers: right, and slower */
#define TILE_ROWS 6
#endif
#define PANEL (2 * LANES)  /* columns of a tile */
#define INLINE static inline __attribute__((always_inline))

/* GCC's vector types: + and * work on all lanes. They may lie anywhere, and alias what they point to. */
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t hvec __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
#ifdef __FLT16_MAX__
typedef _Float16 fvec __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
#endif

enum { FLOAT32, FLOAT16, BFLOAT16 };  /* how a weight is stored; `bindings.py` has the same order */
#define SIZE(stored) ((stored) == FLOAT32 ? 4 : 2)

/* One vector of weights from the `i`-th on, widened to float32. */
INLINE vec load(const void *w, long i, int stored) {
    if (stored == FLOAT32) return *(const vec *)((const float *)w + i);
    const uint16_t *halves = (const uint16_t *)w + i;
    if (stored == BFLOAT16)  /* a bfloat16 is the upper half of a float32 */
        return (vec)(__builtin_convertvector(*(const hvec *)halves, ivec) << 16);
#if defined(__AVX512F__)
    return (vec)__builtin_ia32_vcvtph2ps512_mask((short __attribute__((vector_size(32))))*(const hvec *)halves,
                                                 (vec){0}, -1, 4);
#elif defined(__F16C__)
    return (vec)__builtin_ia32_vcvtph2ps256((short __attribute__((vector_size(16))))*(const hvec *)halves);
#elif defined(__FLT16_MAX__)
    return __builtin_convertvector(*(const fvec *)halves, vec);
#else
#error "This compiler has no 16-bit floats."
#endif
}

/* Where the weights of a tile lie: `side` vectors of them side by side, and the others, if there are more, elsewhere.
   `next` and `second_next` are what will be read soon after each, and memory is asked for it along the way; or NULL. */
struct weights {
    const char *first, *second, *next, *second_next;
    long stride, next_bytes;  /* weights, and bytes of `next`, from one `k` to the next */
};

/* y (+)= x · w for `rows` rows and `vectors` vectors of columns. With constants for `rows`, `vectors`, `side` and
   `stored`, as below, the compiler writes the inner loops out, and `sum` never sees memory. */
INLINE void tile(int rows, int vectors, int side, int stored, const float *x, long x_stride, struct weights w,
                 long depth, float *y, long y_stride, int add) {
    vec sum[TILE_ROWS][4];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) sum[r][v] = (vec){0};
    for (long k = 0; k < depth; k++) {
        vec weights[4];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            weights[v] = load(v < side ? w.first : w.second, k * w.stride + (v % side) * LANES, stored);
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {  /* each line of 64 bytes; some twice, where weights of 16 bits are next */
            const char *next = v < side ? w.next : w.second_next;
            if (next && (v % side) * LANES * SIZE(stored) % 64 == 0)
                __builtin_prefetch(next + k * w.next_bytes + (v % side) * LANES * SIZE(stored));
        }
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            float one = x[r * x_stride + k];
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) sum[r][v] += one * weights[v];
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            vec *place = (vec *)(y + r * y_stride + v * LANES);
            if (add) *place += sum[r][v];
            else *place = sum[r][v];
        }
}

/* Any number of rows, in tiles of as equal a height as can be: 8 rows are 4 and 4, since a tile of 2 would load each
   weight for little. Each height is a tile of its own to the compiler. */
INLINE void tiles(long num_rows, int vectors, int side, int stored, const float *x, long x_stride, struct weights w,
                  long depth, float *y, long y_stride, int add) {
    long most = vectors > 2 ? TILE_ROWS / 2 : TILE_ROWS, num_tiles = (num_rows + most - 1) / most;
    for (long t = 0; t < num_tiles; t++) {
        long first = num_rows * t / num_tiles, end = num_rows * (t + 1) / num_tiles;
        const float *from = x + first * x_stride;
        float *to = y + first * y_stride;
        switch (end - first) {
#define HEIGHT(n) \
            case n: \
                if (n <= most) tile(n, vectors, side, stored, from, x_stride, w, depth, to, y_stride, add); \
                break;
            HEIGHT(1) HEIGHT(2) HEIGHT(3) HEIGHT(4) HEIGHT(5) HEIGHT(6)
#if TILE_ROWS > 6
            HEIGHT(7) HEIGHT(8) HEIGHT(9) HEIGHT(10) HEIGHT(11) HEIGHT(12)
#endif
#undef HEIGHT
        }
    }
}

INLINE vec larger(vec a, vec b) {
    ivec is_a = a > b;
    return (vec)((is_a & (ivec)a) | (~is_a & (ivec)b));
}

/* exp of each lane, to 3 units in the last place: x = n ln 2 + r, exp(x) = 2^n exp(r), and a polynomial for exp(r)
   (Taylor's, of degree 6: |r| is at most ln 2 / 2). Below -87 it is 0, above 88 it stays there. */
INLINE vec exp_vec(vec x) {
    ivec is_zero = x < -87.0f, is_large = x > 88.0f;
    x = (vec)((is_large & (ivec)((vec){0} + 88.0f)) | (~is_large & (ivec)x));
    vec shifted = x * 1.44269504f + 12582912.0f;  /* 1.5 * 2^23: the sum has no digits left behind the point */
    vec n = shifted - 12582912.0f;
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f;  /* ln 2 in two parts, so that n times the first is exact */
    vec p = r * (1 / 720.0f) + 1 / 120.0f;
    p = p * r + 1 / 24.0f;
    p = p * r + 1 / 6.0f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    ivec two_to_n = ((ivec)shifted << 23) + (127 << 23);  /* n stands in the lowest bits of `shifted` */
    return (vec)((ivec)(p * (vec)two_to_n) & ~is_zero);
}
