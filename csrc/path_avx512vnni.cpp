// AVX-512 without the bf16 dot product: bf16 keys and values are widened, as on the other paths.
#define KVERN_PATH path_avx512vnni
#define KVERN_PATH_NAME "avx512vnni"
#include <cstdint>
#include <initializer_list>
#include <type_traits>

#ifdef KVERN_EMULATE_AVX512
#include "emulate_avx512.h"
#endif
#include "family_types.h"
#include "half.h"
#include "layout.h"
#include "simd_avx512.h"
#include "types.h"
#include "path.inc"

namespace kvern {
const KernelTable* avx512vnni_kernels() { return &KVERN_PATH::table; }
}  // namespace kvern
