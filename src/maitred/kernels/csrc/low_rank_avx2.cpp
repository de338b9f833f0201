// What low_rank_run.h says, with AVX2's vectors.
#include "low_rank_run.h"
#include "vec_avx2.h"

namespace maitred {

const LowRankKernels kLowRankAvx2 = low_rank_run::table<Vec8, 2>();

}  // namespace maitred
