// What an operator can see. Names are stable; every series is created at start, so that zero is visible as zero.
#ifndef LOGITD_SERVER_ENGINE_METRICS_H_
#define LOGITD_SERVER_ENGINE_METRICS_H_

#include <memory>

namespace prometheus {
class Registry;
}

namespace logitd::engine {

// To be completed by the engine's author: counters, gauges and histograms with typed methods.
class Metrics {
 public:
  Metrics();
  ~Metrics();
  std::shared_ptr<prometheus::Registry> registry() const { return registry_; }

 private:
  std::shared_ptr<prometheus::Registry> registry_;
};

}  // namespace logitd::engine

#endif  // LOGITD_SERVER_ENGINE_METRICS_H_
