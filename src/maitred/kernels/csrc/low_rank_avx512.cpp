// What low_rank_run.h says, with AVX-512's vectors.
#include "low_rank_run.h"
#include "vec_avx512.h"

namespace maitred {

const LowRankKernels kLowRankAvx512 = low_rank_run::table<Vec16, 4>();

}  // namespace maitred
