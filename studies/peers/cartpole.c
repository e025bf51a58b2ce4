// CartPole-v1 in C, for PufferLib: steps `n` environments and writes to the buffers of PufferLib.
// The equations, the limits and the float64 state are Gymnasium's. An episode that ends restarts in
// the same step, as in PufferLib's environments.

#include <math.h>
#include <stdint.h>
#include <stdlib.h>

#define MAX_STEPS 500

typedef struct {
  double x, x_dot, theta, theta_dot;
  double steps;  // in the current episode; a double, so that NumPy can allocate the struct
} CartPole;

static void start_episode(CartPole *env, unsigned short *seed) {
  env->x = 0.1 * erand48(seed) - 0.05;
  env->x_dot = 0.1 * erand48(seed) - 0.05;
  env->theta = 0.1 * erand48(seed) - 0.05;
  env->theta_dot = 0.1 * erand48(seed) - 0.05;
  env->steps = 0;
}

static void observe(const CartPole *env, float *obs) {
  obs[0] = (float)env->x;
  obs[1] = (float)env->x_dot;
  obs[2] = (float)env->theta;
  obs[3] = (float)env->theta_dot;
}

static void move(CartPole *env, int32_t action) {
  const double tau = 0.02;
  double force = action == 1 ? 10.0 : -10.0;
  double sine = sin(env->theta);
  double cosine = cos(env->theta);
  double temp = (force + 0.05 * env->theta_dot * env->theta_dot * sine) / 1.1;
  double theta_acc =
      (9.8 * sine - cosine * temp) / (0.5 * (4.0 / 3.0 - 0.1 * cosine * cosine / 1.1));
  double x_acc = temp - 0.05 * theta_acc * cosine / 1.1;
  env->x += tau * env->x_dot;
  env->x_dot += tau * x_acc;
  env->theta += tau * env->theta_dot;
  env->theta_dot += tau * theta_acc;
  env->steps += 1;
}

void reset(int n, CartPole *envs, unsigned short *seed, float *obs) {
  for (int i = 0; i < n; i++) {
    start_episode(&envs[i], seed);
    observe(&envs[i], obs + 4 * i);
  }
}

// Return the number of episodes that ended, and write their lengths to `lengths`.
int step(int n, CartPole *envs, unsigned short *seed, const int32_t *actions, float *obs,
         float *rewards, uint8_t *terminals, uint8_t *truncations, int32_t *lengths) {
  int ended = 0;
  for (int i = 0; i < n; i++) {
    CartPole *env = &envs[i];
    move(env, actions[i]);
    rewards[i] = 1.0f;
    terminals[i] = fabs(env->x) > 2.4 || fabs(env->theta) > 12 * 2 * M_PI / 360;
    truncations[i] = !terminals[i] && env->steps >= MAX_STEPS;
    if (terminals[i] || truncations[i]) {
      lengths[ended++] = (int32_t)env->steps;
      start_episode(env, seed);
    }
    observe(env, obs + 4 * i);
  }
  return ended;
}
