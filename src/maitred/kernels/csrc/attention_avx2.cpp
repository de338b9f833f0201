#include "attention.h"
namespace maitred {
const AttentionKernels& attention_kernels_avx2() { return attention_kernels_plain(); }
}  // namespace maitred
