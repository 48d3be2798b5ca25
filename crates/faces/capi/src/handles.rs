//! Live handles: a handle is a slot and a generation, so that a stale one is an error, never a crash.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use impresario_base::lock::RwLock;
use impresario_embed::Scheduler;

/// The handle in a C program. Its address is a number, never dereferenced.
#[repr(C)]
pub struct Handle {
    _opaque: [u8; 0],
}

/// Largest number of schedulers in one process.
const HANDLES_MAX: usize = 4096;
/// The low bits of every handle: odd, so that dereferencing one fails at once, and recognisable.
const MARK: u64 = 0b101;

#[derive(Default)]
struct SchedulerSlot {
    generation: u32,
    scheduler: Option<Arc<Scheduler>>,
}

static PLACES: RwLock<Vec<SchedulerSlot>> = RwLock::new(Vec::new());
/// Number of destroyed schedulers: after a change, threads look up their cached scheduler again.
static DESTROYED: AtomicU64 = AtomicU64::new(0);

/// A cached scheduler of a thread, with a count local to the thread.
struct Known(Arc<Scheduler>);

struct Remembered {
    handle: u64,
    destroyed: u64,
    scheduler: Rc<Known>,
}

thread_local! {
    /// The last scheduler that this thread used, so that threads do not contend for a lock or a counter on every call.
    static LAST: RefCell<Option<Remembered>> = const { RefCell::new(None) };
}

fn encode(generation: u32, place: usize) -> u64 {
    // 29 bits of generation keep the handle below 2^45, where no kernel maps anything at an odd address.
    (u64::from(generation & 0x1fff_ffff) << 13 | place as u64) << 3 | MARK
}

fn decode(handle: u64) -> Option<(u32, usize)> {
    // All bits count: a number that merely ends like a handle is not one.
    (handle & 7 == MARK && handle >> 45 == 0).then_some(((handle >> 16) as u32, (handle >> 3 & 0x1fff) as usize))
}

/// Creates a handle for a scheduler.
pub fn enter(scheduler: Arc<Scheduler>) -> Result<*mut Handle, String> {
    let mut places = PLACES.write();
    let free = places.iter().position(|p| p.scheduler.is_none());
    let place = match free {
        Some(place) => place,
        None if places.len() < HANDLES_MAX => {
            places.push(SchedulerSlot::default());
            places.len() - 1
        }
        None => return Err(format!("there are {HANDLES_MAX} schedulers in this process; destroy some first")),
    };
    let p = &mut places[place];
    p.generation = p.generation.wrapping_add(1) & 0x1fff_ffff;
    p.scheduler = Some(scheduler);
    Ok(std::ptr::without_provenance_mut(encode(p.generation, place) as usize))
}

fn find(handle: u64) -> Option<Arc<Scheduler>> {
    let (generation, place) = decode(handle)?;
    let places = PLACES.read();
    places.get(place).filter(|p| p.generation == generation)?.scheduler.clone()
}

/// Runs `call` on the scheduler of a handle; `None` if there is none.
pub fn with<R>(handle: *const Handle, call: impl FnOnce(&Scheduler) -> R) -> Option<R> {
    let handle = handle.addr() as u64;
    let destroyed = DESTROYED.load(Ordering::Acquire);
    // Cloned, since `call` may replace this thread's cached scheduler.
    let known = LAST
        .try_with(|last| {
            let last = last.borrow();
            let known = last.as_ref().filter(|l| l.handle == handle && l.destroyed == destroyed);
            known.map(|l| Rc::clone(&l.scheduler))
        })
        .ok()
        .flatten();
    if let Some(scheduler) = known {
        return Some(call(&scheduler.0));
    }
    let scheduler = Rc::new(Known(find(handle)?));
    let remembered = Remembered { handle, destroyed, scheduler: Rc::clone(&scheduler) };
    // The previous cached scheduler is dropped outside the borrow: it may be the last reference to a destroyed
    // scheduler.
    let before = LAST.try_with(|last| last.borrow_mut().replace(remembered));
    drop(before);
    Some(call(&scheduler.0))
}

/// Makes a handle stale.
pub fn remove(handle: *const Handle) {
    let Some((generation, place)) = decode(handle.addr() as u64) else { return };
    let mut places = PLACES.write();
    let taken = places.get_mut(place).filter(|p| p.generation == generation).and_then(|p| p.scheduler.take());
    DESTROYED.fetch_add(1, Ordering::Release);
    drop(places);
    drop(taken);
    let _ = LAST.try_with(|last| last.borrow_mut().take_if(|l| l.handle == handle.addr() as u64));
}

#[cfg(test)]
mod tests {
    use impresario_embed::{Options, Receiver};

    use super::*;

    fn scheduler() -> Arc<Scheduler> {
        Arc::new(Scheduler::new(Options::default(), Receiver::Poll).unwrap())
    }

    #[test]
    fn stale_and_foreign_handles_are_nobody() {
        let first = enter(scheduler()).unwrap();
        assert!(with(first, |_| ()).is_some());
        let second = enter(scheduler()).unwrap();
        assert_ne!(first, second);
        std::thread::spawn({
            let second = second.addr();
            move || assert!(with(std::ptr::without_provenance(second), |_| ()).is_some())
        })
        .join()
        .unwrap();
        remove(first);
        assert!(with(first, |_| ()).is_none(), "also for the thread that remembered it");
        let third = enter(scheduler()).unwrap();
        assert_ne!(first, third, "the place is used again with another generation");
        assert!(with(first, |_| ()).is_none());
        assert!(with(third, |_| ()).is_some());
        for foreign in [0usize, 1, 5, 8, 4096, usize::MAX, usize::MAX & !2] {
            assert!(with(std::ptr::without_provenance(foreign), |_| ()).is_none(), "{foreign:#x}");
        }
        let stray = third.addr() | 1 << 60;
        assert!(with(std::ptr::without_provenance(stray), |_| ()).is_none(), "{stray:#x}");
        remove(first); // stale: removes no other scheduler
        assert!(with(third, |_| ()).is_some());
        remove(second);
        remove(third);
    }
}
