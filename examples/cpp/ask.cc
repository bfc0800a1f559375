// Asks a logitd for the three most probable tokens of two rows of logits.
//
//   ask ADDRESS
#include <cstdio>
#include <vector>

#include "client/client.h"

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: ask ADDRESS\n");
    return 2;
  }
  const auto client = logitd::client::Client::Create({.address = argv[1]});
  if (!client.ok()) {
    std::fprintf(stderr, "%s\n", client.status().ToString().c_str());
    return 2;
  }
  const std::vector<float> logits = {0, 3, 1, 2, 5, 4, 7, 6};  // [2, 4]
  logitd::client::TopKRequest request = {.dtype = logitd::v1::DTYPE_F32,
                                         .rows = 2,
                                         .vocab = 4,
                                         .logits = {{reinterpret_cast<const char*>(logits.data()),
                                                     logits.size() * sizeof(logits[0])}}};
  request.params.add_k(3);  // one value for all rows
  const auto answer = (*client)->TopK(request);
  if (!answer.ok()) {
    std::fprintf(stderr, "%s\n", answer.status().ToString().c_str());
    return 1;
  }
  for (int row = 0; row < 2; ++row) {
    for (int i = 0; i < 3; ++i) {
      std::printf("%d %.4f%c", answer->RowIndices(row)[i], answer->RowProbs(row)[i],
                  i < 2 ? ' ' : '\n');
    }
  }
  return 0;
}
