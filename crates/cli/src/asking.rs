//! Asks several servers at the same time.

use std::thread::{Builder, scope};

/// What `ask` returns for each, in their order. Each is asked by a thread of its own; those for which this user may start no thread
/// any more (`ulimit -u`) are asked one after the other.
pub fn each<T: Copy + Send, R: Send>(all: impl IntoIterator<Item = T>, ask: impl Fn(T) -> R + Sync) -> Vec<R> {
    let ask = &ask;
    scope(|scope| {
        let start = |one: T| Builder::new().spawn_scoped(scope, move || ask(one)).map_err(|_| one);
        let asked: Vec<_> = all.into_iter().map(start).collect();
        let answer = |asked: Result<std::thread::ScopedJoinHandle<'_, R>, T>| match asked {
            Ok(thread) => thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
            Err(one) => ask(one),
        };
        asked.into_iter().map(answer).collect()
    })
}
