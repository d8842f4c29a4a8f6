/* What parbank calls of cuBLASLt, on the CPU and as its documentation has it: matrices by columns, D = op(A) op(B) + beta C.

It is strict where the library would read past an end or be silent. bfloat16 only: for any other type it has no algorithm.
Five are proposed: 0 sums from the first to the last; 1 fails when it runs; 2 rounds the sum of the first half; 3 is as 0 and
needs a workspace; 4 is proposed with a status that says it cannot be used. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, NOT_INITIALIZED = 1, INVALID = 7, EXECUTION_FAILED = 13, NOT_SUPPORTED = 15 };
enum { BFLOAT16 = 14, HANDLE = 42, STREAM = 7, ROOM = 64 };

typedef struct { int compute, scale, transposed[2]; } Desc;
typedef struct { int type; uint64_t rows, cols; int64_t step; } Layout;
typedef struct { uint64_t workspace; uint32_t reductions, alignment[4]; } Preference;
typedef struct { uint64_t data[8]; } Algorithm;
typedef struct { Algorithm algorithm; size_t workspace; int state; float waves; int reserved[4]; } Result;

int failing = 0; /* set: every run fails */
int last = -1;   /* which algorithm ran last */

int cublasLtMatmulDescCreate(Desc **out, int compute, int scale) {
    *out = calloc(1, sizeof **out);
    (*out)->compute = compute, (*out)->scale = scale;
    return compute == 68 && scale == 0 ? OK : INVALID;
}

int cublasLtMatmulDescSetAttribute(Desc *desc, int attribute, const void *value, size_t size) {
    if ((attribute != 3 && attribute != 4) || size != 4) return INVALID;
    memcpy(&desc->transposed[attribute - 3], value, size);
    return OK;
}

int cublasLtMatrixLayoutCreate(Layout **out, int type, uint64_t rows, uint64_t cols, int64_t step) {
    *out = malloc(sizeof **out);
    **out = (Layout){type, rows, cols, step};
    return step >= (int64_t)rows ? OK : INVALID;
}

int cublasLtMatmulPreferenceCreate(Preference **out) {
    *out = calloc(1, sizeof **out);
    (*out)->reductions = 7;
    for (int i = 0; i < 4; i++) (*out)->alignment[i] = 256;
    return OK;
}

int cublasLtMatmulPreferenceSetAttribute(Preference *preference, int attribute, const void *value, size_t size) {
    if (size != (attribute == 1 ? 8 : 4)) return INVALID;
    if (attribute == 1) memcpy(&preference->workspace, value, size);
    else if (attribute == 3) memcpy(&preference->reductions, value, size);
    else if (attribute >= 5 && attribute <= 8) memcpy(&preference->alignment[attribute - 5], value, size);
    else return INVALID;
    return OK;
}

int cublasLtMatmulPreferenceDestroy(Preference *preference) {
    free(preference);
    return OK;
}

static int fits(const Desc *desc, const Layout *a, const Layout *b, const Layout *c, const Layout *d) {
    uint64_t m = desc->transposed[0] ? a->cols : a->rows, ka = desc->transposed[0] ? a->rows : a->cols;
    uint64_t n = desc->transposed[1] ? b->rows : b->cols, kb = desc->transposed[1] ? b->cols : b->rows;
    return ka == kb && m == d->rows && n == d->cols && c->rows == m && c->cols == n;
}

int cublasLtMatmulAlgoGetHeuristic(void *handle, Desc *desc, Layout *a, Layout *b, Layout *c, Layout *d,
                                   Preference *preference, int wanted, Result *results, int *count) {
    static const size_t rooms[5] = {0, 0, 0, ROOM, 0};
    if (handle != (void *)HANDLE) return NOT_INITIALIZED;
    if (!fits(desc, a, b, c, d) || preference->reductions != 2 || preference->workspace < ROOM) return INVALID;
    *count = 0;
    if (a->type != BFLOAT16) return NOT_SUPPORTED;
    for (; *count < wanted && *count < 5; ++*count) {
        Result result = {.workspace = rooms[*count], .state = *count == 4 ? NOT_SUPPORTED : OK};
        result.algorithm.data[0] = *count;
        for (int i = 0; i < 4; i++) result.algorithm.data[1 + i] = preference->alignment[i];
        results[*count] = result;
    }
    return OK;
}

static float widen(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static uint16_t narrow(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
}

int cublasLtMatmul(void *handle, Desc *desc, const float *alpha, const uint16_t *a, Layout *la, const uint16_t *b, Layout *lb,
                   const float *beta, const uint16_t *c, Layout *lc, uint16_t *d, Layout *ld, const Algorithm *algorithm,
                   void *workspace, size_t room, void *stream) {
    int which = algorithm->data[0];
    const void *starts[3] = {a, b, c};
    for (int i = 0; i < (*beta ? 3 : 2); i++) /* the output's is the allocator's, which gives a CPU less than a GPU */
        if ((uintptr_t)starts[i] % algorithm->data[1 + i]) return INVALID;
    if (handle != (void *)HANDLE || stream != (void *)STREAM) return NOT_INITIALIZED;
    if (!fits(desc, la, lb, lc, ld) || which > 3 || *alpha != 1) return INVALID;
    if (which == 1 || failing) return which == 1 ? NOT_SUPPORTED : EXECUTION_FAILED;
    if (which == 3) {
        if (!workspace || room < ROOM) return INVALID;
        memset(workspace, 1, ROOM);
    }
    uint64_t depth = desc->transposed[0] ? la->rows : la->cols;
    for (uint64_t j = 0; j < ld->cols; j++)
        for (uint64_t i = 0; i < ld->rows; i++) {
            float sum = 0;
            for (uint64_t k = 0; k < depth; k++) {
                if (which == 2 && k == depth / 2) sum = widen(narrow(sum));
                float left = widen(desc->transposed[0] ? a[k + i * la->step] : a[i + k * la->step]);
                float right = widen(desc->transposed[1] ? b[j + k * lb->step] : b[k + j * lb->step]);
                sum += left * right;
            }
            if (*beta != 0) sum += *beta * widen(c[i + j * lc->step]);
            d[i + j * ld->step] = narrow(sum);
        }
    last = which;
    return OK;
}
