// A sorter for keys: few or many of them.
#ifndef LOGITD_KERNELS_CPU_ROWS_KEY_SORTER_H_
#define LOGITD_KERNELS_CPU_ROWS_KEY_SORTER_H_

#include <algorithm>
#include <cstddef>
#include <functional>

#include "hwy/contrib/sort/vqsort.h"

namespace logitd::cpu {

// Sorts by Highway, except few keys: its sorter asks the system for random bytes at every call,
// which takes longer than to sort them. A thread that runs at the same time needs one of its own.
class KeySorter {
 public:
  template <typename T>
  void operator()(T* keys, size_t count, hwy::SortAscending order) const {
    Sort(keys, count, order, std::less<T>());
  }
  template <typename T>
  void operator()(T* keys, size_t count, hwy::SortDescending order) const {
    Sort(keys, count, order, std::greater<T>());
  }

 private:
  static constexpr size_t kFew = 128;

  template <typename T, typename Order, typename Before>
  void Sort(T* keys, size_t count, Order order, Before before) const {
    if (count <= kFew) {
      std::sort(keys, keys + count, before);
    } else {
      sorter_(keys, count, order);
    }
  }

  hwy::Sorter sorter_;
};

}  // namespace logitd::cpu

#endif  // LOGITD_KERNELS_CPU_ROWS_KEY_SORTER_H_
