//! What policies are made of: queues, rings, buckets, rules, guards. A policy is one level up.

pub(super) mod anticipation;
pub(super) mod arrivals;
pub(super) mod backlog;
pub(super) mod bucket;
pub(super) mod classes;
pub(super) mod file_turns;
pub(super) mod flows;
pub(super) mod history;
pub(super) mod jobs;
pub(super) mod phases;
pub(super) mod ranked;
pub(super) mod ring;
pub(super) mod rules;
pub(super) mod runs;
pub(super) mod server_queues;
pub(super) mod tournament;
pub(super) mod turns;
