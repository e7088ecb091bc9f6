// Moves rows through shared memory: one bulk load of a piece of a row, then one bulk store per
// destination. Each warp has stages of its own; while one stage is stored, the next is loaded.
//
//   lane 0:     load piece into stage n % 2                  (mbarrier: bytes have landed)
//   all lanes:  wait for it -> lanes with a destination store from the stage -> commit
//   all lanes:  before the stage is loaded again, its stores have read it (wait_group.read)
//
// A row's scales are loaded with its first piece: by a bulk copy as well or, where they have
// strides or another alignment, element by element by the lanes. Destinations that bulk copies
// cannot store to get the scales from the lanes.
//
// When quantising, the quantised piece takes the place of the first half of the piece, and a stage
// has room for its scales behind the piece.
//
// A destination belongs to a lane. landed() waits for the stores of all lanes.
#pragma once

#include "cuda/ptx.cuh"
#include "ep/plan/cuda/quantise.cuh"
#include "ep/plan/cuda/row_pieces.h"

namespace xd::ep::cuda {

// The strides of the elements beside a row.
struct Besides {
  std::uint32_t element = 0;  // bytes of one element; 0 = bulk copies load the elements
  std::int64_t stride = 0;    // in bytes
};

// Copies elements of 1, 2, 4 or 8 bytes, by the lanes of a warp, from and to any memory.
__device__ inline void copy_elements(std::byte* to, std::int64_t to_stride, const std::byte* from,
                                     std::int64_t from_stride, std::uint32_t element,
                                     std::uint32_t count) {
  const auto copy = [&]<class Element>(Element) {
    for (std::uint32_t i = threadIdx.x % 32; i < count; i += 32) {
      *reinterpret_cast<Element*>(to + i * to_stride) =
          *reinterpret_cast<const volatile Element*>(from + i * from_stride);
    }
  };
  if (element == 4) {
    copy(std::uint32_t{});
  } else if (element == 1) {
    copy(std::uint8_t{});
  } else if (element == 2) {
    copy(std::uint16_t{});
  } else {
    copy(std::uint64_t{});
  }
}

// A row and its scales: their source (equal in all lanes), or the destination that the lane wants.
struct MoverSource {
  const std::byte* row;
  const std::byte* beside;  // nullptr = nothing, also where a stage has no room for scales
};
struct MoverTarget {
  std::byte* row;  // nullptr = this lane wants nothing
  std::byte* beside;
};

// `Quantiser` is the way rows are quantised, if RowPieces says that they are; see
// ep/plan/cuda/quantise.cuh.
template <class Quantiser>
class Mover {
 public:
  // `shared`: this warp's warp_bytes of shared memory, 128-byte aligned. All lanes call it.
  __device__ Mover(std::byte* shared, const RowPieces& cut, const Besides& besides = {})
      : cut_(cut), besides_(besides), shared_(shared) {
    barriers_ = reinterpret_cast<std::uint64_t*>(shared + cut.warp_bytes - 128);
    if (lane() == 0) {
      for (int i = 0; i < kStages; ++i) ptx::mbarrier_init(barriers_ + i, 1);
      ptx::fence_mbarrier_init();
      ptx::fence_proxy_async_shared();
    }
    __syncwarp();
  }

  // It comes after landed(), and leaves the shared memory free for another mover.
  __device__ ~Mover() {
    __syncwarp();
    if (lane() == 0) {
      for (int i = 0; i < kStages; ++i) ptx::mbarrier_invalidate(barriers_ + i);
    }
    __syncwarp();
  }
  Mover(const Mover&) = delete;
  Mover& operator=(const Mover&) = delete;

  // Begins to load the row that the next move() moves.
  __device__ void start(const MoverSource& from) {
    load(from, 0, carries(from, 0));
    started_ = true;
  }

  // Moves a row to every lane that wants it; when quantising, with its scales. The source must not
  // change until landed().
  __device__ void move(const MoverSource& from, const MoverTarget& to) {
#pragma unroll 1
    for (std::uint32_t i = 0; i < cut_.pieces; ++i) {
      const bool with_beside = carries(from, i);
      if (!started_) load(from, i, with_beside);
      started_ = false;
      store_previous();
      previous_ = {to, i, true, with_beside};
      ++loaded_;
    }
  }

  // Issues the outstanding stores. When it returns, all stores of this warp so far have landed.
  // Their lanes may release them, or the warp may after __syncwarp(). A row that was only started
  // goes nowhere.
  __device__ void landed() {
    store_previous();
    if (started_) {
      started_ = false;
      ++loaded_;
      wait_loaded(stored_++);
    }
    ptx::bulk_wait_landed();
    __syncwarp();
  }

 private:
  struct Previous {
    MoverTarget to;
    std::uint32_t piece;
    bool any, with_beside;
  };

  __device__ bool quantises() const { return Quantiser::kQuantises && cut_.scales_bytes != 0; }
  __device__ static unsigned lane() { return threadIdx.x % 32; }
  __device__ std::uint32_t piece_bytes(std::uint32_t i) const {
    const std::uint32_t rest = cut_.row_bytes - i * cut_.piece_bytes;
    return rest < cut_.piece_bytes ? rest : cut_.piece_bytes;
  }
  __device__ std::byte* stage(std::uint32_t n) const {
    return shared_ + n % kStages * ((cut_.warp_bytes - 128) / kStages);
  }

  __device__ std::byte* beside(std::byte* stage) const { return stage + cut_.piece_bytes; }
  // True if a piece of a row takes the row's scales along.
  __device__ bool carries(const MoverSource& from, std::uint32_t piece) const {
    return piece == 0 && cut_.beside_bytes != 0 && from.beside != nullptr;
  }
  // The copy reads this device's own memory, so it needs no peer and ends by itself.
  __device__ void wait_loaded(std::uint32_t n) const {
    while (!ptx::mbarrier_try_wait(barriers_ + n % kStages, n / kStages % 2)) {
    }
  }

  __device__ void load(const MoverSource& from, std::uint32_t piece, bool with_beside) {
    // The last stores that were issued read from this stage: the other stage's piece is still
    // loading.
    ptx::bulk_wait_sources_read();
    __syncwarp();
    if (lane() == 0) {
      std::uint64_t* barrier = barriers_ + loaded_ % kStages;
      const std::uint32_t bytes = piece_bytes(piece);
      const bool by_bulk = with_beside && besides_.element == 0;
      ptx::mbarrier_arrive_expect_bytes(barrier, bytes + (by_bulk ? cut_.beside_bytes : 0));
      ptx::bulk_load(stage(loaded_), from.row + piece * cut_.piece_bytes, bytes, barrier);
      if (by_bulk) {
        ptx::bulk_load(beside(stage(loaded_)), from.beside, cut_.beside_bytes, barrier);
      }
    }
    if (with_beside && besides_.element != 0) {
      copy_elements(beside(stage(loaded_)), besides_.element, from.beside, besides_.stride,
                    besides_.element, cut_.beside_bytes / besides_.element);
      ptx::fence_proxy_async_shared();  // bulk stores read what the lanes have written
    }
  }

  __device__ void store_previous() {
    if (!previous_.any) return;
    previous_.any = false;
    const std::uint32_t n = stored_++;
    wait_loaded(n);
    std::byte* from = stage(n);
    const MoverTarget& to = previous_.to;
    if (quantises()) {
      if constexpr (Quantiser::kQuantises) store_quantised(from);
    } else {
      if (to.row != nullptr) {
        ptx::bulk_store(to.row + previous_.piece * cut_.piece_bytes, from,
                        piece_bytes(previous_.piece));
      }
      if (previous_.with_beside) store_beside(beside(from), to);
    }
    ptx::bulk_commit();
  }

  __device__ void store_beside(const std::byte* from, const MoverTarget& to) {
    __syncwarp();  // all lanes have loaded their elements
    const auto place = reinterpret_cast<std::uint64_t>(to.beside);
    const bool by_bulk = (place | cut_.beside_bytes) % 16 == 0;
    if (to.row != nullptr && by_bulk) ptx::bulk_store(to.beside, from, cut_.beside_bytes);
    unsigned others = __ballot_sync(0xFFFFFFFFu, to.row != nullptr && !by_bulk);
    if (others == 0) return;
#pragma unroll 1
    while (others != 0) {
      const int other = __ffs(static_cast<int>(others)) - 1;
      others &= others - 1;
      const std::uint64_t there = __shfl_sync(0xFFFFFFFFu, place, other);
      // Copies whole words where they fit; `from` is a multiple of 16.
      const std::uint32_t unit = (there | cut_.beside_bytes) % 4 == 0 ? 4 : 1;
      copy_elements(reinterpret_cast<std::byte*>(there), unit, from, unit, unit,
                    cut_.beside_bytes / unit);
    }
    ptx::fence_proxy_async_shared();  // a bulk load takes the place of what the lanes have read
  }

  __device__ void store_quantised(std::byte* piece) {
    const std::uint32_t columns = piece_bytes(previous_.piece) / 2;
    std::byte* scales = piece + cut_.piece_bytes;
    Quantiser::quantise(piece, scales, columns, cut_.format);
    ptx::fence_proxy_async_shared();  // bulk stores read what the lanes have written
    __syncwarp();
    const MoverTarget& to = previous_.to;
    if (to.row != nullptr) {
      ptx::bulk_store(to.row + previous_.piece * (cut_.piece_bytes / 2), piece, columns);
    }
    store_scales(scales, columns);
  }

  // Stores the scales of the last piece to every lane that wants its row.
  __device__ void store_scales(const std::byte* scales, std::uint32_t columns) {
    const MoverTarget& to = previous_.to;
    const std::uint32_t bytes = Quantiser::scale_bytes(columns, cut_.format);
    const std::uint32_t first =
        previous_.piece * Quantiser::scale_bytes(cut_.piece_bytes / 2, cut_.format);
    unsigned wanting = __ballot_sync(0xFFFFFFFFu, to.row != nullptr);
#pragma unroll 1
    while (wanting != 0) {
      const int other = __ffs(static_cast<int>(wanting)) - 1;
      wanting &= wanting - 1;
      auto* there = reinterpret_cast<std::byte*>(__shfl_sync(
                        0xFFFFFFFFu, reinterpret_cast<unsigned long long>(to.beside), other)) +
                    first;
      if (Quantiser::kFloatScales ||
          (reinterpret_cast<unsigned long long>(there) | bytes) % 4 == 0) {
#pragma unroll 1
        for (std::uint32_t i = lane(); i < bytes / 4; i += 32) {
          reinterpret_cast<std::uint32_t*>(there)[i] =
              reinterpret_cast<const std::uint32_t*>(scales)[i];
        }
      } else {
#pragma unroll 1
        for (std::uint32_t i = lane(); i < bytes; i += 32) there[i] = scales[i];
      }
    }
  }

  const RowPieces cut_;
  const Besides besides_;
  std::byte* shared_;
  std::uint64_t* barriers_;
  std::uint32_t loaded_ = 0, stored_ = 0;
  bool started_ = false;  // the next piece is being loaded already
  Previous previous_{};
};

}  // namespace xd::ep::cuda
