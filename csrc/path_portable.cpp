#define KVERN_PATH path_portable
#define KVERN_PATH_NAME "portable"
#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "family_types.h"
#include "half.h"
#include "layout.h"
#include "simd_portable.h"
#include "types.h"
#include "path.inc"

namespace kvern {
const KernelTable* portable_kernels() { return &KVERN_PATH::table; }
}  // namespace kvern
