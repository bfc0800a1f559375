// A stream's owner that sends back what it gets.
#ifndef LOGITD_TESTS_HTTP2_ECHO_H_
#define LOGITD_TESTS_HTTP2_ECHO_H_

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "absl/types/span.h"
#include "server/http2/stream.h"

namespace logitd::http2::testing {

// On its connection's loop.
class Echo : public StreamEvents {
 public:
  explicit Echo(Stream* stream) : stream_(stream) {}

  void OnBody(absl::Span<const std::byte> bytes) override {
    body_.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  }
  void OnEnd() override { Answer(); }
  void OnSent() override { ++sent_; }
  void OnClosed(Closed why) override {
    stream_ = nullptr;
    closed_ = why;
    ++times_closed_;
  }

  // Sends the body back and ends the stream. `pieces`: how many Sends.
  void Answer(size_t pieces = 1) {
    const Field headers[] = {{":status", "200"}, {"content-type", "test"}};
    const Field trailers[] = {{"result", "done"}};
    stream_->Respond(headers);
    auto kept = std::make_shared<std::string>(body_);
    const size_t each = std::max<size_t>(1, (kept->size() + pieces - 1) / pieces);
    for (size_t at = 0; at < kept->size(); at += each) {
      const size_t bytes = std::min(each, kept->size() - at);
      stream_->Send({{reinterpret_cast<const std::byte*>(kept->data()) + at, bytes}, kept});
    }
    stream_->End(trailers);
  }

  Stream* stream() { return stream_; }  // null: closed
  const std::string& body() const { return body_; }
  int sent() const { return sent_; }
  Closed closed() const { return closed_; }  // after OnClosed
  int times_closed() const { return times_closed_; }

 protected:
  Stream* stream_;
  std::string body_;

 private:
  int sent_ = 0;
  int times_closed_ = 0;
  Closed closed_ = Closed::kEnded;
};

}  // namespace logitd::http2::testing

#endif  // LOGITD_TESTS_HTTP2_ECHO_H_
