/* Who sends a request, as numbers that the scheduler's rules and shares go by, and as names for the administrator. */
#include "translator.h"

#include <stdio.h>
#include <string.h>

/* FNV-1a, 64 bits (Fowler, Noll and Vo): the same on every server and after every start. */
static uint64_t hash(uint64_t seed, const void *bytes, size_t len) {
    const unsigned char *at = bytes;
    uint64_t h = seed ^ 0xcbf29ce484222325ull;
    while (len-- > 0) h = (h ^ *at++) * 0x100000001b3ull;
    return h;
}

uint64_t sched_file_key(inode_t *inode, uuid_t gfid) {
    uint64_t halves[2];
    if (inode && !gf_uuid_is_null(inode->gfid)) gfid = inode->gfid;
    if (gf_uuid_is_null(gfid)) return (uintptr_t)inode;
    memcpy(halves, gfid, sizeof halves); /* a gfid is random: its halves need no mixing */
    return halves[0] ^ halves[1];
}

/* As io-threads does, which has one thread for these unless configured. */
gf_boolean_t sched_is_internal(const call_frame_t *frame) {
    return frame->root->pid < GF_CLIENT_PID_MAX && frame->root->pid != GF_CLIENT_PID_NO_ROOT_SQUASH;
}

/* The key of a host has no top bit, so that it is below 2^63 for every reader of numbers. */
static uint64_t host_key(const char *host, size_t len) {
    return hash(0, host, len) >> 1;
}

/* A client names itself ...-HOST:name-PC_NAME:...; names of another form count as the host's. */
static void host_of(const char *uid, char *host, size_t size) {
    const char *start = strstr(uid, "-HOST:"), *end;
    start = start ? start + strlen("-HOST:") : uid;
    end = strstr(start, "-PC_NAME:");
    size_t len = end ? (size_t)(end - start) : strlen(start);
    if (len >= size) len = size - 1;
    memcpy(host, start, len);
    host[len] = 0;
}

static sched_client_t *client_of(sched_state_t *state, client_t *client) {
    void *found = NULL;
    if (!client) return NULL;
    if (client_ctx_get(client, state->this, &found) == 0 && found) return found;
    sched_client_t *made = GF_CALLOC(1, sizeof *made, sched_mt_client);
    if (!made) return NULL;
    INIT_LIST_HEAD(&made->list);
    host_of(client->client_uid ? client->client_uid : "", made->host, sizeof made->host);
    made->key = host_key(made->host, strlen(made->host));
    GF_ATOMIC_INIT(made->requests, 0);
    GF_ATOMIC_INIT(made->read_bytes, 0);
    GF_ATOMIC_INIT(made->write_bytes, 0);
    pthread_mutex_lock(&state->lock);
    if (++state->connections == 0) state->connections = 1;
    made->connection = state->connections;
    list_add_tail(&made->list, &state->clients);
    pthread_mutex_unlock(&state->lock);
    found = client_ctx_set(client, state->this, made);
    if (found == made) return made;
    /* Another thread was first, or there is no room: this one is not the client's. */
    pthread_mutex_lock(&state->lock);
    list_del(&made->list);
    pthread_mutex_unlock(&state->lock);
    GF_FREE(made);
    return found;
}

void sched_identify(sched_state_t *state, call_frame_t *frame, impresario_submission_t *what) {
    call_stack_t *root = frame->root;
    sched_client_t *client = client_of(state, root->client);
    what->user = root->uid;
    if (client) {
        what->client = client->key;
        what->connection = client->connection;
        GF_ATOMIC_INC(client->requests);
        if (what->op == IMPRESARIO_READ) GF_ATOMIC_ADD(client->read_bytes, what->len);
        if (what->op == IMPRESARIO_WRITE) GF_ATOMIC_ADD(client->write_bytes, what->len);
    }
    if (sched_is_internal(frame)) {
        what->job = INTERNAL_JOB;
        return;
    }
    switch (state->set.job) {
        case JOB_GROUP: what->job = root->gid; break;
        case JOB_OWNER: what->job = hash(what->client, root->lk_owner.data, root->lk_owner.len) >> 1; break;
        case JOB_PROCESS: what->job = hash(what->client, &root->pid, sizeof root->pid) >> 1; break;
    }
}

int32_t sched_client_disconnect(xlator_t *this, client_t *client) {
    sched_state_t *state = this->private;
    void *found = NULL;
    if (!state || client_ctx_get(client, this, &found) != 0 || !found) return 0;
    sched_internal_leave(state, client);
    impresario_cancel_connection(state->scheduler, ((sched_client_t *)found)->connection, sched_request_dropped, state);
    return 0;
}

int32_t sched_client_destroy(xlator_t *this, client_t *client) {
    sched_state_t *state = this->private;
    void *found = NULL;
    if (client_ctx_del(client, this, &found) != 0 || !found) return 0;
    if (state) {
        pthread_mutex_lock(&state->lock);
        list_del(&((sched_client_t *)found)->list);
        pthread_mutex_unlock(&state->lock);
    }
    GF_FREE(found);
    return 0;
}

/* ---- the text of a policy ---- */

/* Copies rules, with the names that administrators know replaced by numbers: host:NAME by the key of that host's
 * clients, internal by the job of GlusterFS's own processes. */
static int expand(const char *rules, char *out, size_t size, char *why, size_t why_size) {
    size_t used = 0;
    char before = 0;
    while (*rules) {
        char number[24];
        size_t len = 0, taken = 1;
        gf_boolean_t value = before == '=' || before == '|';
        if (value && strncmp(rules, "host:", 5) == 0) {
            size_t name = strcspn(rules + 5, "|&{}; \t");
            if (name == 0) {
                snprintf(why, why_size, "\"host:\" in rules needs the name of a host");
                return -1;
            }
            len = (size_t)snprintf(number, sizeof number, "%llu", (unsigned long long)host_key(rules + 5, name));
            taken = 5 + name;
        } else if (value && strncmp(rules, "internal", 8) == 0 && strchr("|&{}; \t", rules[8])) {
            len = (size_t)snprintf(number, sizeof number, "%llu", INTERNAL_JOB);
            taken = 8;
        } else if (*rules == '"' || *rules == '\n') {
            snprintf(why, why_size, "rules must not contain quotation marks or line breaks");
            return -1;
        } else {
            number[len++] = *rules;
        }
        if (used + len + 1 > size) {
            snprintf(why, why_size, "rules are longer than %zu bytes", size);
            return -1;
        }
        memcpy(out + used, number, len);
        used += len;
        before = rules[0];
        rules += taken;
    }
    out[used] = 0;
    return 0;
}

/* Whether a policy has the parameter `rules`; one that the library does not know is left to it to refuse. */
static gf_boolean_t takes_rules(const char *policy) {
    size_t len = strcspn(policy, " \t");
    for (size_t at = 0;; at++) {
        impresario_policy_info_t info = {.size = sizeof info};
        if (impresario_policy(at, &info) != 0) return _gf_true;
        if (strlen(info.name) != len || strncmp(info.name, policy, len) != 0) continue;
        for (size_t param = 0; param < info.params; param++) {
            impresario_param_info_t which = {.size = sizeof which};
            if (impresario_policy_param(at, param, &which) == 0 && strcmp(which.name, "rules") == 0) return _gf_true;
        }
        return _gf_false;
    }
}

char *sched_policy_text(const char *policy, const char *rules, char *why, size_t size) {
    const size_t rules_max = 16 * 1024 + 1; /* the library takes 16 KiB */
    char *text = NULL, *expanded = NULL;
    policy += strspn(policy, " \t");
    if (rules[strspn(rules, " \t")] == 0 || !takes_rules(policy)) {
        text = gf_strdup(policy);
    } else {
        expanded = GF_MALLOC(rules_max, sched_mt_text);
        if (expanded && expand(rules, expanded, rules_max, why, size) != 0) goto out;
        if (expanded && gf_asprintf(&text, "%s rules=\"%s\"", policy, expanded) < 0) text = NULL;
    }
    if (!text) snprintf(why, size, "no memory");
out:
    GF_FREE(expanded);
    return text;
}
