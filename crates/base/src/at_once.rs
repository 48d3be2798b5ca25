//! The same for several at the same time.

use std::thread::{Builder, ScopedJoinHandle, scope};

/// What `act` returns for each, in their order. Each has a thread of its own; those for which this user may start none any more
/// (`ulimit -u`) come one after the other. A panic goes on here.
pub fn each<T: Copy + Send, R: Send>(all: impl IntoIterator<Item = T>, act: impl Fn(T) -> R + Sync) -> Vec<R> {
    let act = &act;
    scope(|scope| {
        let start = |one: T| Builder::new().spawn_scoped(scope, move || act(one)).map_err(|_| one);
        let started: Vec<_> = all.into_iter().map(start).collect();
        let end = |started: Result<ScopedJoinHandle<'_, R>, T>| match started {
            Ok(thread) => thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
            Err(one) => act(one),
        };
        started.into_iter().map(end).collect()
    })
}
