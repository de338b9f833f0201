#include "attention.h"
namespace maitred {
const AttentionKernels& attention_kernels_avx512() { return attention_kernels_plain(); }
}  // namespace maitred
