// What recurrent_run.h says, compiled for avx512.
#include "recurrent_run.h"
#include "vec_avx512.h"

namespace maitred {

const RecurrentKernels& recurrent_kernels_avx512() { return kRecurrent<Vec16>; }

}  // namespace maitred
