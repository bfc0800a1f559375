// The nghttp2 session of a connection: its options, its memory, and the callbacks that lead to
// Connection.
#include <malloc.h>
#include <nghttp2/nghttp2.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <type_traits>

#include "server/http2/connection.h"

namespace logitd::http2 {
namespace {

constexpr int32_t kConnectionWindow = int32_t{1} << 30;  // streams have the windows that matter
// The table of response fields. Those that repeat fit; more would cost each connection memory for
// fields that differ.
constexpr size_t kResponseTable = 512;
// The most of a body in one DATA frame. More is larger than nghttp2's buffer.
constexpr size_t kFrameBytes = size_t{64} << 10;

}  // namespace

// nghttp2 calls these with the connection as its user data.
struct Connection::Callbacks {
  static Connection* Of(void* user) { return static_cast<Connection*>(user); }

  // Its memory, counted as malloc rounds it.
  static void* Count(void* memory, void* user) {
    Of(user)->Hold(&Of(user)->account_.session, static_cast<int64_t>(malloc_usable_size(memory)));
    return memory;
  }
  static void Uncount(void* memory, void* user) {
    Of(user)->Hold(&Of(user)->account_.session, -static_cast<int64_t>(malloc_usable_size(memory)));
  }
  static void* Malloc(size_t bytes, void* user) { return Count(std::malloc(bytes), user); }
  static void* Calloc(size_t n, size_t bytes, void* user) {
    return Count(std::calloc(n, bytes), user);
  }
  static void Free(void* memory, void* user) {
    Uncount(memory, user);
    std::free(memory);
  }
  static void* Realloc(void* memory, size_t bytes, void* user) {
    Uncount(memory, user);
    void* const moved = std::realloc(memory, bytes);
    Count(moved == nullptr ? memory : moved, user);
    return moved;
  }

  // The callback that hands its arguments to a method of the connection.
  template <auto method>
  struct To;
  template <typename Result, typename... Args, Result (Connection::*method)(Args...)>
  struct To<method> {
    static int Call(nghttp2_session*, Args... args, void* user) {
      if constexpr (std::is_same_v<Result, int>) return (Of(user)->*method)(args...);
      (Of(user)->*method)(args...);
      return 0;
    }
  };

  static nghttp2_session_callbacks* Table() {
    static nghttp2_session_callbacks* const table = [] {
      nghttp2_session_callbacks* made = nullptr;
      nghttp2_session_callbacks_new(&made);
      nghttp2_session_callbacks_set_on_begin_frame_callback(made,
                                                            To<&Connection::OnBeginFrame>::Call);
      nghttp2_session_callbacks_set_on_begin_headers_callback(
          made, To<&Connection::OnBeginHeaders>::Call);
      nghttp2_session_callbacks_set_on_header_callback(made, To<&Connection::OnHeader>::Call);
      nghttp2_session_callbacks_set_on_frame_recv_callback(made, To<&Connection::OnFrame>::Call);
      nghttp2_session_callbacks_set_on_data_chunk_recv_callback(made,
                                                                To<&Connection::OnData>::Call);
      nghttp2_session_callbacks_set_on_stream_close_callback(made,
                                                             To<&Connection::OnStreamClose>::Call);
      nghttp2_session_callbacks_set_on_frame_send_callback(made,
                                                           To<&Connection::OnFrameSent>::Call);
      nghttp2_session_callbacks_set_send_data_callback(made, To<&Connection::SendBody>::Call);
      nghttp2_session_callbacks_set_unpack_extension_callback(
          made, [](nghttp2_session*, void**, const nghttp2_frame_hd*, void*) -> int {
            return NGHTTP2_ERR_CANCEL;  // ignored
          });
      nghttp2_session_callbacks_set_data_source_read_length_callback(
          made, [](nghttp2_session*, uint8_t, int32_t, int32_t, int32_t, uint32_t most, void*) {
            return static_cast<ssize_t>(std::min<size_t>(most, kFrameBytes));
          });
      return made;
    }();
    return table;
  }

  static nghttp2_option* Options(const Limits& limits) {
    nghttp2_option* options = nullptr;
    nghttp2_option_new(&options);
    nghttp2_option_set_no_auto_window_update(options, 1);
    nghttp2_option_set_no_closed_streams(options, 1);
    nghttp2_option_set_max_deflate_dynamic_table_size(options, kResponseTable);
    nghttp2_option_set_max_outbound_ack(options, limits.unread_acks);
    // Unknown frames are told to OnBeginFrame, which counts them.
    for (int type = NGHTTP2_ALTSVC; type <= UINT8_MAX; ++type) {
      nghttp2_option_set_user_recv_extension_type(options, static_cast<uint8_t>(type));
    }
    // Resets have a budget of this server, which knows what calls were answered.
    nghttp2_option_set_stream_reset_rate_limit(options, UINT32_MAX, UINT32_MAX);
    return options;
  }
};

void Connection::StartSession() {
  memory_ = {this, &Callbacks::Malloc, &Callbacks::Free, &Callbacks::Calloc, &Callbacks::Realloc};
  nghttp2_option* const options = Callbacks::Options(limits_);
  const int made =
      nghttp2_session_server_new3(&session_, Callbacks::Table(), this, options, &memory_);
  nghttp2_option_del(options);
  if (made != 0) return Close();
  const nghttp2_settings_entry settings[] = {
      {NGHTTP2_SETTINGS_MAX_CONCURRENT_STREAMS, limits_.max_streams},
      {NGHTTP2_SETTINGS_MAX_HEADER_LIST_SIZE, limits_.max_header_list},
      {NGHTTP2_SETTINGS_MAX_FRAME_SIZE, limits_.max_frame},
      {NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE, limits_.early_window},
      {NGHTTP2_SETTINGS_NO_RFC7540_PRIORITIES, 1},
  };
  nghttp2_submit_settings(session_, NGHTTP2_FLAG_NONE, settings, std::size(settings));
  nghttp2_session_set_local_window_size(session_, NGHTTP2_FLAG_NONE, 0, kConnectionWindow);
  Wake();
}

}  // namespace logitd::http2
