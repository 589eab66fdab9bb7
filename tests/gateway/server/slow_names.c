/* A name server that does not answer: names that begin with "hang-" take a minute and fail; the name "live.test" is 127.0.0.1. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <netdb.h>
#include <string.h>
#include <unistd.h>

typedef int look_up(const char *, const char *, const struct addrinfo *, struct addrinfo **);

int getaddrinfo(const char *name, const char *service, const struct addrinfo *hints, struct addrinfo **found) {
  look_up *system_look_up = (look_up *)dlsym(RTLD_NEXT, "getaddrinfo");
  if (name && !strncmp(name, "hang-", 5)) {
    sleep(60);
    return EAI_AGAIN;
  }
  return system_look_up(name && !strcmp(name, "live.test") ? "127.0.0.1" : name, service, hints, found);
}
