// What recurrent_run.h says, compiled for avx2.
#include "recurrent_run.h"
#include "vec_avx2.h"

namespace maitred {

const RecurrentKernels& recurrent_kernels_avx2() { return kRecurrent<Vec8>; }

}  // namespace maitred
