// The jobs that calls of a loop give to the engine in one turn.
#ifndef LOGITD_SERVER_RPC_TRANSPORT_TURN_JOBS_H_
#define LOGITD_SERVER_RPC_TRANSPORT_TURN_JOBS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "server/engine/engine.h"
#include "server/http2/loop.h"
#include "server/rpc/transport/request_job.h"

namespace logitd::rpc {

// Submits them together at the turn's end: the engine's lock is taken once for all of them.
class TurnJobs {
 public:
  TurnJobs(engine::Engine* engine, int loops) {
    for (int i = 0; i < loops; ++i) lanes_.push_back(std::make_unique<Lane>(engine));
  }

  // On `loop`, where Drop of the job is called too.
  void Add(http2::Loop& loop, std::shared_ptr<RequestJob> job) {
    Lane& lane = *lanes_[static_cast<size_t>(loop.index())];
    lane.jobs.push_back(std::move(job));
    loop.AtTurnEnd(&lane);
  }

 private:
  struct Lane final : http2::Source {
    explicit Lane(engine::Engine* engine) : engine(engine) {}
    void OnReady(uint32_t) override {}
    void OnTurnEnd() override {
      // Dropped jobs end here, and calls that get their room may add others to `jobs`.
      taken.swap(jobs);
      for (std::shared_ptr<RequestJob>& job : taken) {
        if (job->BeginSubmit()) submitted.push_back(std::move(job));
      }
      if (!submitted.empty()) engine->Submit(absl::MakeSpan(submitted));
      submitted.clear();
      taken.clear();
    }

    engine::Engine* const engine;
    std::vector<std::shared_ptr<RequestJob>> jobs;
    std::vector<std::shared_ptr<RequestJob>> taken;  // of this turn; empty between turns
    std::vector<std::shared_ptr<engine::Job>> submitted;
  };

  std::vector<std::unique_ptr<Lane>> lanes_;  // by loop
};

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_TRANSPORT_TURN_JOBS_H_
