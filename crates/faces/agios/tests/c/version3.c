/* The later interface: a callback and its argument with every request, metrics. */
#define AGIOS_API 3
#include "check.h"

static char a[] = "file a", b[] = "file b";

static void *own(int64_t id, void *argument) {
    *(int64_t *)argument = id;
    note(id);
    return NULL;
}

static void *common(int64_t id) {
    note(-id);
    return NULL;
}

int main(void) {
    int64_t got[4] = { 0, 0, 0, 0 };
    start_over();
    CHECK(agios_get_metrics_and_reset() == NULL);
    CHECK(agios_init(NULL, NULL, config("default_algorithm = \"TO\""), 0));
    CHECK(!agios_add_request(a, RT_READ, 0, 10, 1, 0, NULL, NULL)); /* no callback could be called */
    for (int i = 1; i <= 3; i++) CHECK(agios_add_request(i < 3 ? a : b, i == 3 ? RT_WRITE : RT_READ, i * 100, i * 10, i, 0, own, &got[i]));
    wait_served(3);
    CHECK(got[1] == 1 && got[2] == 2 && got[3] == 3);
    CHECK(agios_release_request(b, RT_WRITE, 30, 300) && agios_release_request(a, RT_READ, 10, 100));
    struct agios_metrics_t *m = agios_get_metrics_and_reset();
    CHECK(m);
    CHECK(m->total_reqnb == 3 && m->reads == 2 && m->writes == 1);
    CHECK(m->avg_request_size == 20 && m->max_request_size == 30 && m->avg_time_between_requests > 0);
    CHECK(m->filenb == 2 && m->avg_offset_distance == 90 && m->served_bytes == 40);
    free(m);
    CHECK(agios_release_request(a, RT_READ, 20, 200));
    m = agios_get_metrics_and_reset();
    CHECK(m && m->total_reqnb == 0 && m->filenb == 1 && m->served_bytes == 20 && m->avg_time_between_requests == 0);
    free(m);
    agios_exit();

    start_over();
    CHECK(agios_init(common, NULL, config("default_algorithm = \"TO\""), 0));
    CHECK(agios_add_request(a, RT_READ, 0, 10, 5, 0, NULL, NULL));
    CHECK(agios_add_request(a, RT_READ, 50, 10, 6, 0, own, &got[0]));
    wait_served(2);
    CHECK(seen[0] == -5 && seen[1] == 6 && got[0] == 6);
    agios_exit();
    puts("ok");
    return 0;
}
