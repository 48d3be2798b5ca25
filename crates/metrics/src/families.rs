//! The list of metrics: name, kind, unit, and the place of the values in a server's status.

/// What a metric is to Prometheus.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Only grows, from 0 at the server's start or when its statistics are reset.
    Counter,
    /// Goes up and down.
    Gauge,
    /// Counts of values by size.
    Histogram,
}

impl Kind {
    /// Its name in the text format.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
            Kind::Histogram => "histogram",
        }
    }
}

/// A metric.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Family {
    /// Its name without the prefix `impresario_`.
    pub name: &'static str,
    /// What it is to Prometheus.
    pub kind: Kind,
    /// One line for people.
    pub help: &'static str,
    /// Values of the status are divided by this: 10⁹ where the status has nanoseconds and the metric seconds.
    pub per: f64,
    /// Places in the status: keys, separated by `/`. `[label]` stands for every element of an array and adds its index
    /// as a label; `[label=member,…]` adds those members of it, as far as it has them. `{label}` stands for every member of an object and adds its
    /// key. At the end, `<label>` makes a text a label of the value 1, and ` label=text` adds a constant label.
    pub places: &'static [&'static str],
}

const NS: f64 = 1e9;

const fn family(
    name: &'static str,
    kind: Kind,
    per: f64,
    help: &'static str,
    places: &'static [&'static str],
) -> Family {
    Family { name, kind, help, per, places }
}

const fn counter(name: &'static str, help: &'static str, places: &'static [&'static str]) -> Family {
    family(name, Kind::Counter, 1.0, help, places)
}

const fn gauge(name: &'static str, help: &'static str, places: &'static [&'static str]) -> Family {
    family(name, Kind::Gauge, 1.0, help, places)
}

/// All metrics, in the order in which they are written.
pub const FAMILIES: &[Family] = &[
    gauge("uptime_seconds", "Time since the server's start.", &["uptime_s"]),
    // Connections and memory.
    gauge("connections", "Open connections.", &["connections/open"]),
    gauge("connections_limit", "Maximum open connections.", &["connections/max"]),
    counter("connections_accepted_total", "Connections accepted.", &["connections/accepted"]),
    counter("connections_refused_total", "Connections refused at a limit.", &["connections/refused"]),
    counter("connections_evicted_total", "Connections closed to make room for others.", &["connections/evicted"]),
    counter(
        "complaints_total",
        "Connections closed for breaking the protocol or a limit.",
        &["connections/complaints"],
    ),
    counter("calls_total", "Calls received.", &["connections/calls"]),
    gauge("calls_in_progress", "Calls received and not yet answered.", &["connections/calls_under_way"]),
    counter(
        "polls_total",
        "Waits for a message that began with polling, by whether it came in time.",
        &["polls/paid outcome=paid", "polls/in_vain outcome=in_vain"],
    ),
    gauge("memory_bytes", "Memory in use for requests and replies.", &["memory/payload_bytes", "memory/used_bytes"]),
    gauge(
        "memory_peak_bytes",
        "Most memory in use for requests and replies so far.",
        &["memory/payload_bytes_peak", "memory/peak_bytes"],
    ),
    gauge(
        "memory_limit_bytes",
        "Limit of the memory for requests and replies.",
        &["memory/payload_bytes_max", "memory/max_bytes"],
    ),
    // The scheduler.
    gauge("policy_info", "The policy in force, as a label; the value is 1.", &["engine/policy/name<policy>"]),
    gauge("queue_requests", "Requests queued at the policy.", &["engine/queued"]),
    gauge(
        "queue_blocked_requests",
        "Requests that wait for an older conflicting one, or with what is to be read ahead of their file.",
        &["engine/blocked"],
    ),
    gauge("queue_limit_requests", "Maximum outstanding requests.", &["engine/capacity"]),
    gauge("in_flight_batches", "Batches in flight, by data server (lane).", &["engine/lanes/[lane]/in_flight_batches"]),
    gauge("in_flight_bytes", "Bytes in flight, by data server (lane).", &["engine/lanes/[lane]/in_flight_bytes"]),
    counter("requests_accepted_total", "Requests accepted by the scheduler.", &["engine/statistics/accepted"]),
    counter(
        "requests_completed_total",
        "Requests completed by the scheduler, failed ones included.",
        &["engine/statistics/completed"],
    ),
    counter("requests_failed_total", "Requests that failed.", &["engine/statistics/failed"]),
    counter("requests_cancelled_total", "Requests cancelled while queued.", &["engine/statistics/cancelled"]),
    counter(
        "requests_passed_total",
        "Requests served by memory without scheduling: reads, which are counted nowhere else, and writes, which are.",
        &["engine/statistics/passed"],
    ),
    counter(
        "bytes_total",
        "Bytes moved by batches, by operation.",
        &["engine/statistics/read_bytes operation=read", "engine/statistics/write_bytes operation=write"],
    ),
    counter("batches_total", "Batches dispatched.", &["engine/statistics/batches"]),
    family(
        "request_seconds",
        Kind::Histogram,
        NS,
        "Time from a request's arrival at the scheduler to its completion, by operation.",
        &[
            "engine/histograms/request_ns/read operation=read",
            "engine/histograms/request_ns/write operation=write",
            "engine/histograms/request_ns/other operation=other",
        ],
    ),
    family(
        "queue_seconds",
        Kind::Histogram,
        NS,
        "Time from a request's arrival at the scheduler to its dispatch.",
        &["engine/histograms/queue_ns"],
    ),
    family(
        "service_seconds",
        Kind::Histogram,
        NS,
        "Time that a batch took below the scheduler.",
        &["engine/histograms/service_ns"],
    ),
    family(
        "request_bytes",
        Kind::Histogram,
        1.0,
        "Sizes of reads and writes as they arrived.",
        &["engine/histograms/request_bytes"],
    ),
    family(
        "batch_bytes",
        Kind::Histogram,
        1.0,
        "Sizes of batches as they were dispatched.",
        &["engine/histograms/batch_bytes"],
    ),
    // Who loads the server: at most 33 parties each.
    counter(
        "job_requests_total",
        "Requests that ended, by application; the busiest ones and the others together.",
        &["loads/jobs/[job=key]/requests"],
    ),
    counter(
        "job_bytes_total",
        "Bytes read and written, by application; the busiest ones and the others together.",
        &["loads/jobs/[job=key]/read_bytes operation=read", "loads/jobs/[job=key]/write_bytes operation=write"],
    ),
    counter(
        "job_seconds_total",
        "Sum of the times from arrival to end, by application; the busiest ones and the others together.",
        &["loads/jobs/[job=key]/time_s"],
    ),
    counter(
        "user_requests_total",
        "Requests that ended, by user; the busiest ones and the others together.",
        &["loads/users/[user=key]/requests", "calls/users/[user=user]/calls"],
    ),
    counter(
        "user_bytes_total",
        "Bytes read and written, by user; the busiest ones and the others together.",
        &[
            "loads/users/[user=key]/read_bytes operation=read",
            "loads/users/[user=key]/write_bytes operation=write",
            "calls/users/[user=user]/read_bytes operation=read",
            "calls/users/[user=user]/written_bytes operation=write",
        ],
    ),
    counter(
        "user_seconds_total",
        "Sum of the times from arrival to end, by user; the busiest ones and the others together.",
        &["loads/users/[user=key]/time_s", "calls/users/[user=user]/took_s"],
    ),
    counter(
        "client_requests_total",
        "Calls of NFS clients; the busiest ones and the others together.",
        &["calls/clients/[client=client]/calls"],
    ),
    counter(
        "client_bytes_total",
        "Bytes of NFS clients; the busiest ones and the others together.",
        &[
            "calls/clients/[client=client]/read_bytes operation=read",
            "calls/clients/[client=client]/written_bytes operation=write",
        ],
    ),
    counter(
        "client_seconds_total",
        "Sum of the times of NFS clients' calls; the busiest ones and the others together.",
        &["calls/clients/[client=client]/took_s"],
    ),
    // Limits that cannot be borrowed beyond: at most 64 classes.
    gauge(
        "limit_waiting_requests",
        "Requests that a limit withholds, by rule and by job, user, client or file.",
        &["limits/classes/[rule=rule,key=key]/waiting"],
    ),
    gauge(
        "limit_portion",
        "The part of a limit over all servers that this server may grant.",
        &["limits/classes/[rule=rule,key=key]/fraction"],
    ),
    gauge(
        "limit_peer_answers",
        "0 while a server does not say what it granted of limits over all servers.",
        &["limits/peers/[peer=name]/answers"],
    ),
    // Reading ahead.
    counter(
        "read_ahead_predicted_bytes_total",
        "Bytes read ahead because the server predicted them.",
        &["read_ahead/predicted_bytes"],
    ),
    counter(
        "read_ahead_hit_bytes_total",
        "Bytes read ahead and then asked for, by source.",
        &["read_ahead/hit_bytes source=prediction", "read_ahead/hints/hit_bytes source=hint"],
    ),
    counter(
        "read_ahead_wasted_bytes_total",
        "Bytes read ahead for nothing, by source.",
        &["read_ahead/wasted_bytes source=prediction", "read_ahead/hints/wasted_bytes source=hint"],
    ),
    gauge(
        "read_ahead_outstanding_bytes",
        "Bytes read ahead that may still be asked for, by source.",
        &["read_ahead/outstanding_bytes source=prediction", "read_ahead/hints/outstanding_bytes source=hint"],
    ),
    gauge(
        "read_ahead_late_bytes",
        "Predicted bytes that were read ahead and not asked for in time, and may be yet.",
        &["read_ahead/late_bytes"],
    ),
    counter("read_ahead_hinted_bytes_total", "Bytes that clients gave hints for.", &["read_ahead/hints/hinted_bytes"]),
    counter(
        "read_ahead_gained_seconds_total",
        "Device time that requests did not wait for because their bytes were read ahead.",
        &["read_ahead/gained_s"],
    ),
    counter(
        "read_ahead_lost_seconds_total",
        "Device time spent on bytes that were read ahead for nothing.",
        &["read_ahead/lost_s"],
    ),
    // Data servers.
    gauge("store_total_bytes", "Size of the file system that holds the store.", &["store/total_bytes"]),
    gauge("store_free_bytes", "Free space of the file system that holds the store.", &["store/free_bytes"]),
    counter(
        "checksum_corrupt_blocks_total",
        "Blocks of objects that did not fit their checksums, each time that was found.",
        &["checksums/corrupt_blocks"],
    ),
    counter(
        "checksum_failures_total",
        "Syncs of objects whose checksums could not be stored: their last changes are unchecked.",
        &["checksums/failures"],
    ),
    gauge("checksum_unsettled_blocks", "Checksums that are not stored yet.", &["checksums/unsettled_blocks"]),
    counter(
        "storage_failures_total",
        "Calls that the file system below the server failed, by kind, such as EIO.",
        &["failures/kinds/{kind}/count"],
    ),
    gauge("store_files_free", "Files that the file system of the store can still create.", &["store/files_free"]),
    gauge(
        "device_modelled",
        "1 if the times of this server are those of a device model and not of a device.",
        &["device/modelled"],
    ),
    // I/O nodes.
    gauge("forward_waiting_requests", "Requests released by the policy and not yet forwarded.", &["forward/waiting"]),
    gauge("forward_in_flight_requests", "Forwarded requests that are not yet answered.", &["forward/in_flight"]),
    gauge("forward_stuck_requests", "Forwarded requests at data servers that do not answer.", &["forward/stuck"]),
    counter("forward_requests_total", "Reads and writes of clients that were forwarded.", &["forward/requests"]),
    counter("forwarded_total", "Requests as merged in the dispatch queue.", &["forward/forwarded"]),
    counter("forwarded_bytes_total", "Bytes of the requests as merged.", &["forward/forwarded_bytes"]),
    counter("forward_failed_total", "Forwarded requests that failed.", &["forward/failed"]),
    // The metadata server.
    gauge("meta_sessions", "Open sessions of clients.", &["meta/sessions"]),
    gauge("meta_open_files", "Files that clients have open.", &["meta/open_files"]),
    gauge("meta_locks", "File locks that clients hold.", &["meta/locks/held"]),
    gauge("meta_locks_waiting", "Requests that wait for file locks.", &["meta/locks/waiting"]),
    gauge("meta_lock_clients", "Clients that have file locks, or had some lately.", &["meta/locks/clients"]),
    gauge(
        "meta_orphans",
        "Removed files whose objects are not yet removed; at most 10,000 are counted.",
        &["meta/orphans_waiting"],
    ),
    gauge("meta_background_jobs", "Jobs queued in the background.", &["meta/background_jobs"]),
    gauge(
        "meta_data_servers_answer",
        "0 while data servers do not answer and background jobs wait for them.",
        &["meta/data_servers_answer"],
    ),
    counter(
        "meta_faults_total",
        "Operations on names that failed, by operation.",
        &["meta/operations/{operation}/faults"],
    ),
    family(
        "meta_seconds",
        Kind::Histogram,
        NS,
        "Time of operations on names, by operation.",
        &["meta/operations/{operation}/histogram_ns"],
    ),
    // The NFS server.
    gauge("nfs_mounts", "Clients that have mounted an export.", &["mounts"]),
    gauge(
        "nfs_waiting",
        "Calls that wait for a thread, by kind.",
        &["waiting/names kind=names", "waiting/data kind=data"],
    ),
    gauge("nfs_unsent_bytes", "Bytes of answers that clients have not taken yet.", &["connections/unsent_bytes"]),
    counter("nfs_repeated_total", "Repeated calls that were answered from memory.", &["repetitions/repeated"]),
    counter("nfs_failed_total", "Calls that failed, by procedure.", &["calls/procedures/{procedure}/failed"]),
    counter(
        "nfs_postponed_total",
        "Calls that the client was told to repeat later, by procedure.",
        &["calls/procedures/{procedure}/postponed"],
    ),
    family(
        "nfs_seconds",
        Kind::Histogram,
        NS,
        "Time from a call's arrival to its answer, by procedure.",
        &["calls/procedures/{procedure}/histogram_ns"],
    ),
];
