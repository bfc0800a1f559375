// Who goes first: start-time fair queuing over callers, and the heaps that keep its order.
//
// Source: Goyal, Vin & Cheng, Start-time fair queuing: a scheduling algorithm for integrated
// services packet switching networks, SIGCOMM 1996.
#ifndef LOGITD_SERVER_ENGINE_FAIR_QUEUE_H_
#define LOGITD_SERVER_ENGINE_FAIR_QUEUE_H_

#include <cstddef>
#include <cstdint>
#include <tuple>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "server/engine/caller.h"

namespace logitd::engine {

// Less is served first: kInteractive before kBatch, then by virtual start time, then by arrival.
struct Urgency {
  Priority priority = Priority::kInteractive;
  double start = 0;  // nanoseconds of virtual time
  uint64_t sequence = 0;
  friend bool operator<(const Urgency& a, const Urgency& b) {
    return std::tie(a.priority, a.start, a.sequence) < std::tie(b.priority, b.start, b.sequence);
  }
};

// Virtual time: it passes with the work that is served, and for each caller with the cost of its
// own work divided by its weight. A piece of work starts where its caller's last one ends, but not
// before now. So of two callers that always have work waiting, each gets time by its weight. A
// caller that had none waiting comes before all that have used time since, and saves up nothing.
//
// A caller's long and short work, and its work of each priority, are counted apart: long work that
// waits does not delay short work of the same caller.
//
// Not thread-safe.
class FairClock {
 public:
  // The virtual start of work that arrives now.
  double Arrive(const Caller& caller, bool is_long, double cost_ns);

  // Work with that start is served.
  void Serve(double start);

  // Work of `caller` cost `by_ns` more (or less) than Arrive was told.
  void Correct(const Caller& caller, bool is_long, double by_ns);

  // No work waits or runs: all callers are equal again.
  void Idle() { now_ = latest_; }

  // Accounts in memory: those of callers with work in the system, and some that are not forgotten
  // yet.
  size_t accounts() const { return ends_.size(); }

 private:
  struct Account {
    uint64_t caller;
    Priority priority;
    bool is_long;
    friend bool operator==(const Account&, const Account&) = default;
    template <typename H>
    friend H AbslHashValue(H hash, const Account& account) {
      return H::combine(std::move(hash), account.caller, account.priority, account.is_long);
    }
  };
  void Forget();

  double now_ = 0;
  double latest_ = 0;     // of all ends
  size_t forget_at_ = 0;  // accounts, before the next search for those to forget
  // The virtual time at which each account's work ends. One that is not after now_ can be
  // forgotten.
  absl::flat_hash_map<Account, double> ends_;
};

// An item's neighbours in a heap.
template <typename T>
struct HeapLinks {
  T* child = nullptr;
  T* next = nullptr;
  T* previous = nullptr;
};

// A heap of items that hold their own links: a pairing heap, so any item can leave it, and a push
// allocates nothing. Least first, by Links::Before. Not thread-safe.
//   struct Links {
//     static HeapLinks<T>& Of(T& item);
//     static bool Before(const T& a, const T& b);
//   };
template <typename T, typename Links>
class FairHeap {
 public:
  T* top() const { return root_; }

  void Push(T* item) {
    Links::Of(*item) = {};
    root_ = root_ == nullptr ? item : Merge(root_, item);
  }

  // `item` is in the heap.
  void Remove(T* item) {
    auto& links = Links::Of(*item);
    T* rest = MergeAll(links.child);
    if (item == root_) {
      root_ = rest;
    } else {
      auto& before = Links::Of(*links.previous);
      (before.child == item ? before.child : before.next) = links.next;
      if (links.next != nullptr) Links::Of(*links.next).previous = links.previous;
      if (rest != nullptr) root_ = Merge(root_, rest);
    }
    links = {};
  }

 private:
  // Both are roots. `previous` of a first child is its parent.
  static T* Merge(T* a, T* b) {
    if (Links::Before(*b, *a)) std::swap(a, b);
    auto& parent = Links::Of(*a);
    auto& child = Links::Of(*b);
    child.next = parent.child;
    if (parent.child != nullptr) Links::Of(*parent.child).previous = b;
    child.previous = a;
    parent.child = b;
    return a;
  }

  // Merges siblings in pairs, then the pairs from the last to the first.
  static T* MergeAll(T* first) {
    T* pairs = nullptr;  // linked by `next`, the last one first
    while (first != nullptr) {
      T* a = first;
      T* b = Links::Of(*a).next;
      first = b == nullptr ? nullptr : Links::Of(*b).next;
      Unlink(a);
      if (b != nullptr) {
        Unlink(b);
        a = Merge(a, b);
      }
      Links::Of(*a).next = pairs;
      pairs = a;
    }
    T* root = nullptr;
    while (pairs != nullptr) {
      T* next = Links::Of(*pairs).next;
      Unlink(pairs);
      root = root == nullptr ? pairs : Merge(root, pairs);
      pairs = next;
    }
    return root;
  }

  static void Unlink(T* item) {
    auto& links = Links::Of(*item);
    links.next = nullptr;
    links.previous = nullptr;
  }

  T* root_ = nullptr;
};

}  // namespace logitd::engine

#endif  // LOGITD_SERVER_ENGINE_FAIR_QUEUE_H_
