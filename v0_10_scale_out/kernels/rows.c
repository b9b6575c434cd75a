/* What is done to each token's row by itself: RMSNorm, the rotation of queries and keys, SwiGLU's gate.

   In PyTorch each of these is several passes over memory, and each pass a call; here it is one. Threads share the rows,
   where there are enough numbers to be worth waking them. */
#include "tile.h"

#define MANY 32768  /* numbers; below, one thread is done before another is awake */

/* out = x / sqrt(mean(x²) + eps) * weight, each [num_rows][width]. */
void rms_norm(const float *x, long num_rows, long width, const float *weight, float eps, float *out) {
#pragma omp parallel for if (num_rows * width >= MANY)
    for (long r = 0; r < num_rows; r++) {
        const float *row = x + r * width;
        float *to = out + r * width;
        vec sums = {0};
        float sum = 0.0f;
        long c = 0;
        for (; c + LANES <= width; c += LANES) sums += *(const vec *)(row + c) * *(const vec *)(row + c);
        for (; c < width; c++) sum += row[c] * row[c];
        for (int lane = 0; lane < LANES; lane++) sum += sums[lane];
        float scale = 1.0f / sqrtf(sum / width + eps);
        for (c = 0; c < width; c++) to[c] = row[c] * scale * weight[c];
    }
}

/* Rotate, in place, each pair (x[i], x[i + head_dim / 2]) of each head by its token's angles. A token's heads lie
   side by side, `stride` floats behind those of the token before; cos and sin are [num_rows][head_dim / 2]. */
void rotate(float *x, long num_rows, long stride, long num_heads, long head_dim, const float *cos, const float *sin) {
    long half = head_dim / 2;
#pragma omp parallel for if (num_rows * num_heads * head_dim >= MANY)
    for (long r = 0; r < num_rows; r++)
        for (long h = 0; h < num_heads; h++) {
            float *first = x + r * stride + h * head_dim, *second = first + half;
            const float *c = cos + r * half, *s = sin + r * half;
#pragma GCC ivdep
            for (long i = 0; i < half; i++) {
                float a = first[i], b = second[i];
                first[i] = a * c[i] - b * s[i];
                second[i] = b * c[i] + a * s[i];
            }
        }
}

/* out = silu(gate) * up with silu(g) = g / (1 + exp(-g)); a row is [gate, up], of `width` each. */
void silu_mul(const float *gate_up, long num_rows, long width, float *out) {
#pragma omp parallel for if (num_rows * width >= MANY)
    for (long r = 0; r < num_rows; r++) {
        const float *gate = gate_up + 2 * r * width, *up = gate + width;
        float *to = out + r * width;
        long c = 0;
        for (; c + LANES <= width; c += LANES) {
            vec g = *(const vec *)(gate + c);
            *(vec *)(to + c) = g / (1.0f + exp_vec(-g)) * *(const vec *)(up + c);
        }
        for (; c < width; c++) to[c] = gate[c] / (1.0f + expf(-gate[c])) * up[c];
    }
}
