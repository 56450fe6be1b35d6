#define KVERN_PATH path_avx512
#define KVERN_PATH_NAME "avx512"
#include <cstdint>
#include <initializer_list>
#include <type_traits>

#ifdef KVERN_EMULATE_AVX512
#include "emulate_avx512.h"
#define __AVX512BF16__ 1
#endif
#include "family_types.h"
#include "half.h"
#include "layout.h"
#include "simd_avx512.h"
#include "types.h"
#include "path.inc"

namespace kvern {
const KernelTable* avx512_kernels() { return &KVERN_PATH::table; }
}  // namespace kvern
