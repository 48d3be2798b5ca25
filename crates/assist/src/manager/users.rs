//! What each user's programs hold in the manager, and what they may.

use rustc_hash::{FxHashMap, FxHashSet};

use crate::config::{Budget, Limits};

/// Memory of the rings of one user's programs, and of all, at most. A ring's pages are the program's; one that punches
/// holes into its ring has them filled here.
const RING_BYTES_MAX: (u64, u64) = (256 << 20, 384 << 20);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Use {
    programs: u64,
    ring_bytes: u64,
    files: u64,
    held_bytes: u64,
}

/// Who lacked room for what was to be brought in.
#[derive(Debug, Default)]
pub(super) struct Short {
    /// The node had none: everybody.
    node: bool,
    users: FxHashSet<u32>,
}

impl Short {
    /// Whether what a user holds is in the way.
    pub(super) fn concerns(&self, uid: u32) -> bool {
        self.node || self.users.contains(&uid)
    }
}

/// Programs, open files and bytes of all users.
#[derive(Debug)]
pub(super) struct Users {
    limits: Limits,
    budget: Budget,
    node_bytes: u64,
    held_bytes: u64,
    ring_bytes: u64,
    users: FxHashMap<u32, Use>,
    short: Short,
}

impl Users {
    /// With the limits of the configuration and, where its budget is 0, `node_bytes` for the node.
    pub(super) fn new(limits: Limits, budget: Budget, node_bytes: u64) -> Users {
        let (users, short) = (FxHashMap::default(), Short::default());
        let mut users = Users { limits, budget, node_bytes: 0, held_bytes: 0, ring_bytes: 0, users, short };
        users.set_node_bytes(node_bytes);
        users
    }

    /// The memory of the node changed; no effect where the configuration names the budget.
    pub(super) fn set_node_bytes(&mut self, bytes: u64) {
        self.node_bytes = if self.budget.per_node > 0 { self.budget.per_node } else { bytes };
    }

    pub(super) fn node_bytes(&self) -> u64 {
        self.node_bytes
    }

    pub(super) fn held_bytes(&self) -> u64 {
        self.held_bytes
    }

    fn per_user_bytes(&self) -> u64 {
        if self.budget.per_user > 0 { self.budget.per_user } else { self.node_bytes / 2 }
    }

    /// The budget of one file, never 0.
    pub(super) fn per_file_bytes(&self) -> u64 {
        if self.budget.per_file > 0 { self.budget.per_file } else { (self.node_bytes / 4).max(1) }
    }

    /// A program connects. False when its user has as many as allowed.
    pub(super) fn connect(&mut self, uid: u32) -> bool {
        let user = self.users.entry(uid).or_default();
        let room = user.programs < self.limits.programs_per_user;
        user.programs += u64::from(room);
        room
    }

    pub(super) fn disconnect(&mut self, uid: u32) {
        self.change(uid, |user| user.programs -= 1);
    }

    /// A program brings a ring. False when there is no room for it.
    pub(super) fn take_ring(&mut self, uid: u32, bytes: u64) -> bool {
        let user = self.users.entry(uid).or_default();
        let room = user.ring_bytes + bytes <= RING_BYTES_MAX.0 && self.ring_bytes + bytes <= RING_BYTES_MAX.1;
        if room {
            user.ring_bytes += bytes;
            self.ring_bytes += bytes;
        }
        room
    }

    pub(super) fn drop_ring(&mut self, uid: u32, bytes: u64) {
        self.ring_bytes -= bytes;
        self.change(uid, |user| user.ring_bytes -= bytes);
    }

    /// A program that has `of_program` files open registers one more, while `closing` of its user are being closed here.
    /// False when there is no room for it.
    pub(super) fn open(&mut self, uid: u32, of_program: usize, closing: u64) -> bool {
        let limits = self.limits;
        let user = self.users.entry(uid).or_default();
        let room = user.files.saturating_add(closing) < limits.files_per_user
            && (of_program as u64) < limits.files_per_program;
        user.files += u64::from(room);
        room
    }

    pub(super) fn close(&mut self, uid: u32) {
        self.change(uid, |user| user.files -= 1);
    }

    /// How many more bytes a user may prefetch for a file for which `file_held_bytes` are held.
    pub(super) fn room_bytes(&self, uid: u32, file_held_bytes: u64) -> u64 {
        let user = self.users.get(&uid).map_or(0, |u| u.held_bytes);
        let node = self.node_bytes.saturating_sub(self.held_bytes);
        let user = self.per_user_bytes().saturating_sub(user);
        node.min(user).min(self.per_file_bytes().saturating_sub(file_held_bytes))
    }

    /// A user had no room for more of a file for which `file_held_bytes` are held. Where that is the file's own limit, nobody else
    /// is in its way.
    pub(super) fn is_short(&mut self, uid: u32, file_held_bytes: u64) {
        let of_file = self.per_file_bytes().saturating_sub(file_held_bytes);
        if self.node_bytes.saturating_sub(self.held_bytes) < of_file {
            self.short.node = true;
        } else if self.room_bytes(uid, file_held_bytes) < of_file && self.users.contains_key(&uid) {
            self.short.users.insert(uid);
        }
    }

    /// Who was short of room since the last call.
    pub(super) fn take_short(&mut self) -> Short {
        std::mem::take(&mut self.short)
    }

    /// What a file holds on a user's account changed.
    pub(super) fn held(&mut self, uid: u32, before_bytes: u64, after_bytes: u64) {
        if before_bytes != after_bytes {
            self.held_bytes = self.held_bytes + after_bytes - before_bytes;
            self.users.entry(uid).or_default().held_bytes += after_bytes;
            self.change(uid, |user| user.held_bytes -= before_bytes);
        }
    }

    fn change(&mut self, uid: u32, change: impl FnOnce(&mut Use)) {
        if let Some(user) = self.users.get_mut(&uid) {
            change(user);
            if *user == Use::default() {
                self.users.remove(&uid);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_user_has_its_own_limits() {
        let limits = Limits { programs_per_user: 2, files_per_user: 3, files_per_program: 2 };
        let mut users = Users::new(limits, Budget::default(), 1000);
        assert_eq!([1, 1, 1, 2].map(|uid| users.connect(uid)), [true, true, false, true]);
        assert_eq!(
            [(1, 0), (1, 1), (1, 2), (1, 0), (1, 0)].map(|(u, n)| users.open(u, n, 0)),
            [true, true, false, true, false]
        );
        assert!(!users.open(2, 0, 3) && users.open(2, 0, 2), "what is not closed yet counts");
        assert_eq!((users.room_bytes(1, 0), users.room_bytes(1, 200)), (250, 50));
        users.held(1, 0, 450);
        assert_eq!((users.room_bytes(1, 0), users.room_bytes(2, 0)), (50, 250));
        users.held(2, 0, 500);
        assert_eq!(users.room_bytes(2, 0), 0);
        users.held(1, 450, 0);
        users.held(2, 500, 0);
        users.close(2);
        users.disconnect(2);
        assert_eq!((users.held_bytes(), users.users.len()), (0, 1), "users without anything are forgotten");
    }

    #[test]
    fn rings_are_bounded_for_a_user_and_for_all() {
        let mut users = Users::new(Limits::default(), Budget::default(), 1000);
        let bytes = 640 << 10;
        let of = |users: &mut Users, uid| (0..10_000).take_while(|_| users.take_ring(uid, bytes)).count() as u64;
        let taken = [1, 2, 3].map(|uid| of(&mut users, uid));
        assert_eq!(taken, [RING_BYTES_MAX.0 / bytes, (RING_BYTES_MAX.1 / bytes) - RING_BYTES_MAX.0 / bytes, 0]);
        users.drop_ring(1, bytes);
        assert!(users.take_ring(3, bytes));
    }

    #[test]
    fn the_configuration_goes_first() {
        let budget = Budget { per_file: 10, per_user: 20, per_node: 30 };
        let mut users = Users::new(Limits::default(), budget, 1 << 40);
        users.set_node_bytes(1 << 41);
        assert_eq!((users.node_bytes(), users.room_bytes(7, 0)), (30, 10));
    }
}
