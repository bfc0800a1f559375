/* The three most probable tokens of two rows of logits, by the C interface of the ops, on the CPU.
 *
 *   cc top_k.c -llogitd && ./a.out
 */
#include <stdio.h>

#include "logitd/kernels/c_api.h"

int main(void) {
  float logits[2][4] = {{0, 3, 1, 2}, {5, 4, 7, 6}};
  int32_t ids[2][3];
  float probs[2][3];
  logitd_context* context;
  if (logitd_open("cpu", 0, 0, 0, &context) != LOGITD_OK) {
    fprintf(stderr, "%s\n", logitd_error());
    return 1;
  }
  logitd_call call = {0};
  logitd_softmax_topk op = {.struct_size = sizeof(op),
                            .input = {logits, 2, 4, 4, LOGITD_F32, 0},
                            .temperature = {.all = 1},
                            .k = 3,
                            .indices = ids[0],
                            .probs = probs[0]};
  int32_t code = logitd_run_softmax_topk(context, &call, &op);
  if (code != LOGITD_OK) fprintf(stderr, "%s\n", logitd_error());
  for (int r = 0; r < 2 && code == LOGITD_OK; ++r)
    for (int i = 0; i < 3; ++i)
      printf("%d %.4f%c", (int)ids[r][i], probs[r][i], i < 2 ? ' ' : '\n');
  logitd_close(context);
  return code;
}
