// logitctl score.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <limits>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "client/cli/commands.h"
#include "client/cli/output.h"
#include "client/cli/plot.h"
#include "client/cli/session.h"
#include "client/client.h"
#include "client/language_model.h"
#include "client/tensor_file.h"

namespace logitd::cli {
namespace {

// A bar on standard error, where that is a terminal and the work takes its time.
class Progress {
 public:
  explicit Progress(std::string what) : what_(std::move(what)) {}
  ~Progress() {
    if (shown_) absl::FPrintF(stderr, "\r\033[K");
  }

  void Show(int64_t done, int64_t total, const std::string& note = "") {
    constexpr absl::Duration kStep = absl::Milliseconds(100);
    constexpr int kCells = 30;
    if (!terminal_ || absl::Now() < next_) return;
    next_ = absl::Now() + kStep;
    const int filled = static_cast<int>(kCells * done / std::max<int64_t>(1, total));
    absl::FPrintF(stderr, "\r\033[K%s [%s%s] %d of %d%s", what_, std::string(filled, '#'),
                  std::string(kCells - filled, '.'), done, total, note);
    shown_ = true;
  }

 private:
  const std::string what_;
  const bool terminal_ = isatty(STDERR_FILENO) != 0;
  absl::Time next_ = absl::Now() + absl::Milliseconds(400);  // what is done by then has no bar
  bool shown_ = false;
};

// What is to be scored, and what keeps it alive.
struct Scored {
  client::ScoreRequest request;
  std::vector<int32_t> targets;
  std::unique_ptr<client::LanguageModel> model;  // null: from files
  client::FileTensor tensor;
  std::string computed;
};

absl::StatusOr<std::vector<int32_t>> LoadTargets(const std::string& file, int64_t rows) {
  const absl::StatusOr<std::vector<int64_t>> wide = client::LoadIntegers(file);
  if (!wide.ok()) return wide.status();
  if (static_cast<int64_t>(wide->size()) != rows) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "--targets: %s has %d values; allowed: %d, one for each row", file, wide->size(), rows));
  }
  std::vector<int32_t> targets;
  targets.reserve(wide->size());
  for (int64_t target : *wide) {
    if (target < std::numeric_limits<int32_t>::min() ||
        target > std::numeric_limits<int32_t>::max()) {
      return absl::InvalidArgumentError(
          absl::StrFormat("--targets: %s has %d at row %d; allowed: numbers of 32 bits", file,
                          target, targets.size()));
    }
    targets.push_back(static_cast<int32_t>(target));
  }
  return targets;
}

absl::Status LoadFiles(const ScoreFlags& flags, Scored* scored) {
  const bool hidden = !flags.hidden.empty();
  if (flags.targets.empty()) {
    return absl::InvalidArgumentError(
        "--targets is missing; with --logits or --hidden it names a file of the rows' token ids");
  }
  if (hidden && flags.head.empty()) {
    return absl::InvalidArgumentError(
        "--head is missing; with --hidden it names a head that the server has loaded");
  }
  if (!hidden && !flags.head.empty()) {
    return absl::InvalidArgumentError("--head beside --logits; allowed with --hidden or a text");
  }
  absl::StatusOr<client::FileTensor> loaded =
      client::LoadMatrix(hidden ? flags.hidden : flags.logits);
  if (!loaded.ok()) return loaded.status();
  scored->tensor = *std::move(loaded);
  client::ScoreRequest& request = scored->request;
  request.dtype = scored->tensor.dtype;
  request.rows = scored->tensor.shape[0];
  if (hidden) {
    request.head = flags.head;
    request.hidden_size = scored->tensor.shape[1];
    request.hidden = {scored->tensor.bytes};
  } else {
    request.vocab = scored->tensor.shape[1];
    request.logits = {scored->tensor.bytes};
  }
  absl::StatusOr<std::vector<int32_t>> targets = LoadTargets(flags.targets, request.rows);
  if (!targets.ok()) return targets.status();
  scored->targets = *std::move(targets);
  return absl::OkStatus();
}

// Of a text, kept here until it is scored.
constexpr int64_t kMaxComputedBytes = int64_t{1} << 30;

// At most: a head's states may be of 16 bits.
int64_t ComputedRowBytes(const client::LanguageModel& model, const std::string& head) {
  return static_cast<int64_t>(sizeof(float)) *
         (head.empty() ? model.vocab_size() : model.hidden_dim());
}

absl::Status LoadText(const ScoreFlags& flags, Scored* scored) {
  if (!flags.targets.empty()) {
    return absl::InvalidArgumentError(
        "--targets beside a text; allowed with --logits or --hidden, for a text's are its tokens");
  }
  std::string text = flags.text;
  if (!flags.text_file.empty()) {
    std::ifstream in(flags.text_file, std::ios::binary);
    std::ostringstream all;  // which a directory fails, where an iterator over it throws
    if (!(all << in.rdbuf())) {
      return absl::NotFoundError(
          absl::StrFormat("--text-file: %s cannot be read, or is empty", flags.text_file));
    }
    text = std::move(all).str();
  }
  absl::StatusOr<client::LanguageModel> model = LoadModel(flags.model);
  if (!model.ok()) return model.status();
  scored->model = std::make_unique<client::LanguageModel>(*std::move(model));
  scored->targets = scored->model->Tokenize(text);
  if (scored->targets.empty()) {
    return absl::InvalidArgumentError("the text is empty; allowed: one token or more");
  }
  const auto tokens = static_cast<int64_t>(scored->targets.size());
  const int64_t most = kMaxComputedBytes / ComputedRowBytes(*scored->model, flags.head);
  if (tokens > most) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "the text has %d tokens; allowed: 1..%d%s", tokens, most,
        flags.head.empty() ? ", for all their logits are kept; with --head more" : ""));
  }
  return absl::OkStatus();
}

// Row i is the model's state before token i: hidden states for the head, or its own logits. After a
// newline comes bos, unscored, as in what the model was trained on: a paragraph a line.
void RunModel(const v1::Head& head, Scored* scored) {
  const client::LanguageModel& model = *scored->model;
  client::ScoreRequest& request = scored->request;
  request.rows = static_cast<int64_t>(scored->targets.size());
  request.dtype = head.name().empty() ? v1::DTYPE_F32 : head.dtype();
  scored->computed.reserve(
      static_cast<size_t>(request.rows * ComputedRowBytes(model, head.name())));
  Progress progress("reading");
  client::LanguageModel::State state = model.InitialState();
  std::vector<float> hidden = model.Step(state, model.bos_token_id());
  for (int64_t row = 0; row < request.rows; ++row) {
    scored->computed += head.name().empty() ? ToDType(model.Logits(hidden), v1::DTYPE_F32)
                                            : ToDType(hidden, head.dtype());
    const int32_t token = scored->targets[static_cast<size_t>(row)];
    hidden = model.Step(state, token);
    if (model.TokenBytes(token).back() == '\n') hidden = model.Step(state, model.bos_token_id());
    progress.Show(row + 1, request.rows);
  }
  if (head.name().empty()) {
    request.vocab = model.vocab_size();
    request.logits = {scored->computed};
  } else {
    request.head = head.name();
    request.hidden_size = head.hidden();
    request.hidden = {scored->computed};
  }
}

v1::ScoreRequest MakeParams(const ScoreFlags& flags, const std::vector<int32_t>& targets) {
  v1::ScoreRequest params;
  params.mutable_targets()->Add(targets.begin(), targets.end());
  params.set_ignore_index(flags.ignore_index);
  params.add_temperature(flags.temperature);
  params.add_softcap(flags.softcap);
  params.add_label_smoothing(flags.label_smoothing);
  params.add_smoothing(flags.smoothing == "megatron" ? v1::SMOOTHING_CONVENTION_MEGATRON
                                                     : v1::SMOOTHING_CONVENTION_TORCH);
  params.add_z_loss(flags.z_loss);
  params.add_top_logprobs(flags.top_logprobs);
  params.mutable_extra_ids()->Add(flags.extra_ids.begin(), flags.extra_ids.end());
  params.set_want_rank(flags.rank);
  params.set_want_entropy(flags.entropy);
  return params;
}

}  // namespace

int RunScore(const CommonFlags& common, const ScoreFlags& flags) {
  if (!flags.out.empty()) {
    if (absl::Status good = client::CheckSavable(flags.out, v1::DTYPE_F32); !good.ok()) {
      return BadInput(good);
    }
  }
  const bool files = !flags.logits.empty() || !flags.hidden.empty();
  Scored scored;
  if (absl::Status loaded = files ? LoadFiles(flags, &scored) : LoadText(flags, &scored);
      !loaded.ok()) {
    return BadInput(loaded);
  }
  absl::StatusOr<std::unique_ptr<client::Client>> client = Connect(common);
  if (!client.ok()) return BadInput(client.status());
  if (scored.model != nullptr) {
    const absl::StatusOr<v1::Head> head = FindHead(**client, flags.head, *scored.model);
    if (!head.ok()) return NoHead(head.status(), common.address);
    RunModel(*head, &scored);
  }
  scored.request.params = MakeParams(flags, scored.targets);

  absl::StatusOr<client::ScoreResult> result;
  {
    Progress progress("scoring");
    result = (*client)->ScoreStream(scored.request, [&](const client::ScoreProgress& now) {
      progress.Show(now.rows, now.total_rows,
                    absl::StrFormat(" rows, perplexity %.4g", now.totals.perplexity()));
      return true;
    });
  }
  if (!result.ok()) return CallFailed(result.status(), common.address);
  const v1::ScoreResponse& answer = result->answer;
  const absl::Span<const float> losses(answer.losses().data(),
                                       static_cast<size_t>(answer.losses_size()));
  const ScoreOutput output = {
      .result = &*result,
      .targets = scored.targets,
      .text = TextOf(scored.model.get(), scored.targets),
      .top_text = TextOf(scored.model.get(),
                         {answer.top_ids().data(), static_cast<size_t>(answer.top_ids_size())}),
      .totals = flags.totals};
  // First: what was worked out is not lost with a file that cannot be written.
  Print(common.format == "json" ? ScoreJson(output) : ScoreTable(output));
  if (!flags.out.empty()) {
    const absl::Status saved = client::SaveTensor(
        flags.out, v1::DTYPE_F32, {answer.losses_size()},
        {reinterpret_cast<const char*>(losses.data()), losses.size() * sizeof(float)});
    if (!saved.ok()) return BadInput(saved);
  }
  if (!flags.plot.empty()) {
    const absl::Status plotted = PlotLosses(flags.plot, losses, answer.totals().loss_mean());
    if (!plotted.ok()) return BadInput(plotted);
  }
  return kExitOk;
}

}  // namespace logitd::cli
