//! Access control lists as POSIX.1e and Linux have them: who may do what with a node, how lists and permission bits go
//! together, and what a new node inherits. And their bytes as the kernel gives and takes them.
//!
//! A list has an entry for the owner, the owning group and all others, and may have entries for further users and groups. Those
//! and the owning group's are limited by its mask. The permission bits of a node say the same of the owner, the mask (or the
//! owning group, where there is no mask) and the others: where they differ from a list's entries, the bits are right.

/// What identifies the form of the bytes.
const VERSION: u32 = 2;
const HEADER_BYTES: usize = 4;
const ENTRY_BYTES: usize = 8;
/// Number of the entries that name nobody.
const NOBODY: u32 = u32::MAX;

const OWNER: u16 = 0x01;
const USER: u16 = 0x02;
const OWNING_GROUP: u16 = 0x04;
const GROUP: u16 = 0x08;
const MASK: u16 = 0x10;
const OTHERS: u16 = 0x20;

/// What an entry allows: 4 to read, 2 to write, 1 to execute or search.
type Rights = u8;

/// An entry of a user or group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Named {
    id: u32,
    rights: Rights,
}

/// An access control list.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Acl {
    owner: Rights,
    users: Vec<Named>,
    group: Rights,
    groups: Vec<Named>,
    mask: Option<Rights>,
    others: Rights,
}

/// These bytes are no access control list.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum BadAcl {
    /// They are cut off, or of a form that this program does not know.
    #[error("the bytes are not those of an access control list")]
    Form,
    /// An entry is missing, there twice, out of order or unknown, or allows more than there is.
    #[error("the access control list lacks an entry, or has one that cannot be there")]
    Entries,
}

impl Acl {
    /// The list that says what these permission bits say.
    pub fn of_mode(mode: u32) -> Acl {
        let [owner, group, others] = classes(mode);
        Acl { owner, users: Vec::new(), group, groups: Vec::new(), mask: None, others }
    }

    /// Reads a list; `None`: it has no entries, which means that there is to be none.
    pub fn decode(bytes: &[u8]) -> Result<Option<Acl>, BadAcl> {
        let (version, entries) = bytes.split_first_chunk::<HEADER_BYTES>().ok_or(BadAcl::Form)?;
        if u32::from_le_bytes(*version) != VERSION || entries.len() % ENTRY_BYTES != 0 {
            return Err(BadAcl::Form);
        }
        if entries.is_empty() {
            return Ok(None);
        }
        let mut acl = Acl::of_mode(0);
        let (mut last, mut has_others) = (0, false);
        for entry in entries.chunks_exact(ENTRY_BYTES) {
            let [t0, t1, r0, r1, i0, i1, i2, i3] = *entry else { return Err(BadAcl::Form) };
            let (tag, rights) = (u16::from_le_bytes([t0, t1]), u16::from_le_bytes([r0, r1]));
            let id = u32::from_le_bytes([i0, i1, i2, i3]);
            let rights = Rights::try_from(rights).ok().filter(|rights| *rights <= 7).ok_or(BadAcl::Entries)?;
            let may_follow: &[u16] = match tag {
                OWNER => &[0],
                USER => &[OWNER, USER],
                OWNING_GROUP => &[OWNER, USER],
                GROUP => &[OWNING_GROUP, GROUP],
                MASK => &[OWNING_GROUP, GROUP],
                OTHERS => &[OWNING_GROUP, GROUP, MASK],
                _ => return Err(BadAcl::Entries),
            };
            if !may_follow.contains(&last) {
                return Err(BadAcl::Entries);
            }
            last = tag;
            match tag {
                OWNER => acl.owner = rights,
                OWNING_GROUP => acl.group = rights,
                MASK => acl.mask = Some(rights),
                OTHERS => (acl.others, has_others) = (rights, true),
                _ if id == NOBODY => return Err(BadAcl::Entries),
                USER => acl.users.push(Named { id, rights }),
                _ => acl.groups.push(Named { id, rights }),
            }
        }
        let needs_mask = !(acl.users.is_empty() && acl.groups.is_empty());
        let is_whole = has_others && (acl.mask.is_some() || !needs_mask);
        if is_whole { Ok(Some(acl)) } else { Err(BadAcl::Entries) }
    }

    /// The bytes of the list.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = VERSION.to_le_bytes().to_vec();
        let mut put = |tag: u16, rights: Rights, id: u32| {
            bytes.extend(tag.to_le_bytes());
            bytes.extend(u16::from(rights).to_le_bytes());
            bytes.extend(id.to_le_bytes());
        };
        put(OWNER, self.owner, NOBODY);
        self.users.iter().for_each(|named| put(USER, named.rights, named.id));
        put(OWNING_GROUP, self.group, NOBODY);
        self.groups.iter().for_each(|named| put(GROUP, named.rights, named.id));
        if let Some(mask) = self.mask {
            put(MASK, mask, NOBODY);
        }
        put(OTHERS, self.others, NOBODY);
        bytes
    }

    /// The permission bits that go with it, without set-id and sticky.
    pub fn mode(&self) -> u32 {
        u32::from(self.owner) << 6 | u32::from(self.mask.unwrap_or(self.group)) << 3 | u32::from(self.others)
    }

    /// Whether permission bits alone say all that it says.
    pub fn is_mode(&self) -> bool {
        self.mask.is_none()
    }

    /// The list of a node that has it and these permission bits.
    pub fn with_mode(self, mode: u32) -> Acl {
        let [owner, middle, others] = classes(mode);
        match self.mask {
            Some(_) => Acl { owner, mask: Some(middle), others, ..self },
            None => Acl { owner, group: middle, others, ..self },
        }
    }

    /// The list of a node that is made with these permission bits, the umask not taken off, in a directory that gives it to
    /// new nodes.
    pub fn inherited(self, mode: u32) -> Acl {
        let mode = self.mode() & mode;
        self.with_mode(mode)
    }

    /// What its owning group may do.
    pub fn group_rights(&self) -> u32 {
        u32::from(self.group & self.mask.unwrap_or(7))
    }

    /// The users and groups that it names.
    pub fn named(&self) -> (impl Iterator<Item = u32>, impl Iterator<Item = u32>) {
        (self.users.iter().map(|named| named.id), self.groups.iter().map(|named| named.id))
    }

    /// Whether a user may do all of `wanted` (4 to read, 2 to write, 1 to execute or search) with a node of this owner and group
    /// that has the list. `is_user` says whether a number is that user's, `is_in` whether a group is one of theirs. The first
    /// entry that is theirs counts; of their groups, one that allows all.
    pub fn permits(
        &self,
        (owner, group): (u32, u32),
        is_user: impl Fn(u32) -> bool,
        is_in: impl Fn(u32) -> bool,
        wanted: u32,
    ) -> bool {
        let allows = |rights: Rights| u32::from(rights) & wanted == wanted;
        let allows_masked = |rights: Rights| allows(rights & self.mask.unwrap_or(7));
        if is_user(owner) {
            return allows(self.owner);
        }
        if let Some(named) = self.users.iter().find(|named| is_user(named.id)) {
            return allows_masked(named.rights);
        }
        let owning = Named { id: group, rights: self.group };
        let mut theirs = std::iter::once(&owning).chain(&self.groups).filter(|named| is_in(named.id)).peekable();
        if theirs.peek().is_none() {
            return allows(self.others);
        }
        theirs.any(|named| allows_masked(named.rights))
    }
}

/// What permission bits say of the owner, the group or mask, and the others.
fn classes(mode: u32) -> [Rights; 3] {
    [6, 3, 0].map(|shift| (mode >> shift & 7) as Rights)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn list(entries: &[(u16, u16, u32)]) -> Vec<u8> {
        let mut bytes = VERSION.to_le_bytes().to_vec();
        for (tag, rights, id) in entries {
            bytes.extend(tag.to_le_bytes());
            bytes.extend(rights.to_le_bytes());
            bytes.extend(id.to_le_bytes());
        }
        bytes
    }

    const SHORT: [(u16, u16, u32); 3] = [(OWNER, 6, NOBODY), (OWNING_GROUP, 4, NOBODY), (OTHERS, 0, NOBODY)];

    fn long() -> Vec<(u16, u16, u32)> {
        let owner = [(OWNER, 7, NOBODY), (USER, 6, 1000), (USER, 0, 1001)];
        let groups = [(OWNING_GROUP, 5, NOBODY), (GROUP, 2, 50), (MASK, 6, NOBODY), (OTHERS, 1, NOBODY)];
        owner.into_iter().chain(groups).collect()
    }

    #[test]
    fn lists_are_read_as_the_kernel_writes_them() {
        let acl = Acl::decode(&list(&SHORT)).unwrap().unwrap();
        assert_eq!((acl.mode(), acl.is_mode(), acl), (0o640, true, Acl::of_mode(0o640)));
        let acl = Acl::decode(&list(&long())).unwrap().unwrap();
        assert_eq!((acl.mode(), acl.is_mode(), acl.encode()), (0o761, false, list(&long())));
        assert_eq!(Acl::decode(&list(&[])), Ok(None));
        // A mask alone makes it more than bits can say.
        let masked = [SHORT[0], SHORT[1], (MASK, 7, NOBODY), SHORT[2]];
        let masked = Acl::decode(&list(&masked)).unwrap().unwrap();
        assert_eq!((masked.mode(), masked.is_mode(), masked.group_rights()), (0o670, false, 4));
    }

    #[test]
    fn what_is_no_list_is_refused() {
        let good = list(&long());
        for bytes in [&b""[..], b"\x02\0\0", b"\x01\0\0\0", b"\x03\0\0\0", &good[..good.len() - 1], &good[1..]] {
            assert_eq!(Acl::decode(bytes), Err(BadAcl::Form), "{bytes:?}");
        }
        let with = |at: usize, entry| {
            let mut entries = long();
            entries.insert(at, entry);
            entries
        };
        let without = |at: usize| {
            let mut entries = long();
            entries.remove(at);
            entries
        };
        for entries in [
            vec![SHORT[0]],
            vec![SHORT[0], SHORT[2]],
            vec![SHORT[1], SHORT[2]],
            vec![SHORT[0], SHORT[1], SHORT[2], SHORT[2]],
            vec![SHORT[1], SHORT[0], SHORT[2]],
            vec![(OWNER, 8, NOBODY), SHORT[1], SHORT[2]],
            with(0, SHORT[0]),
            with(7, (0x40, 0, NOBODY)),
            with(1, (USER, 7, NOBODY)),
            with(5, (MASK, 7, NOBODY)),
            with(7, (GROUP, 7, 5)),
            without(5),
            without(0),
            without(3),
            without(6),
        ] {
            assert_eq!(Acl::decode(&list(&entries)), Err(BadAcl::Entries), "{entries:?}");
        }
    }

    #[test]
    fn permission_bits_are_those_of_owner_mask_and_others() {
        let acl = Acl::decode(&list(&long())).unwrap().unwrap();
        let changed = acl.clone().with_mode(0o640);
        assert_eq!((changed.mode(), changed.mask, changed.group), (0o640, Some(4), 5));
        let made = acl.clone().inherited(0o666);
        assert_eq!((made.mode(), made.group, made.users), (0o660, 5, acl.users.clone()));
        assert_eq!(Acl::of_mode(0o750).inherited(0o666), Acl::of_mode(0o640));
        assert_eq!(acl.group_rights(), 4);
    }

    #[test]
    fn the_first_entry_that_is_theirs_counts() {
        let acl = Acl::decode(&list(&long())).unwrap().unwrap();
        let may = |uid: u32, groups: &[u32], wanted| {
            acl.permits((10, 20), |user| user == uid, |group| groups.contains(&group), wanted)
        };
        assert!(may(10, &[], 7), "the owner, whom no mask limits");
        assert!(may(1000, &[], 6) && !may(1000, &[], 1));
        assert!(!may(1001, &[20, 50], 4) && !may(1001, &[20], 1), "whatever their groups may");
        assert!(may(5, &[20], 4) && !may(5, &[20], 1), "the mask takes the execution");
        assert!(may(5, &[50], 2) && !may(5, &[20, 50], 6), "no one group has both");
        assert!(may(5, &[], 1) && !may(5, &[], 4));
    }

    /// The access check of POSIX.1e, section 23.1.5, step by step over the list of entries.
    fn reference(entries: &[(u16, u16, u32)], owned: (u32, u32), uid: u32, groups: &[u32], wanted: u16) -> bool {
        let of = |tag: u16| entries.iter().find(|entry| entry.0 == tag).map(|entry| entry.1);
        let mask = of(MASK).unwrap_or(7);
        if uid == owned.0 {
            return of(OWNER).unwrap() & wanted == wanted;
        }
        for (tag, rights, id) in entries {
            if *tag == USER && *id == uid {
                return rights & mask & wanted == wanted;
            }
        }
        let (mut matched, mut allowed) = (false, false);
        for (tag, rights, id) in entries {
            let group = if *tag == OWNING_GROUP { owned.1 } else { *id };
            if (*tag == OWNING_GROUP || *tag == GROUP) && groups.contains(&group) {
                matched = true;
                allowed |= rights & mask & wanted == wanted;
            }
        }
        if matched { allowed } else { of(OTHERS).unwrap() & wanted == wanted }
    }

    fn any_entries() -> impl Strategy<Value = Vec<(u16, u16, u32)>> {
        let named = |tag: u16| {
            proptest::collection::btree_map(0..6u32, 0..8u16, 0..4)
                .prop_map(move |map| map.into_iter().map(|(id, rights)| (tag, rights, id)).collect::<Vec<_>>())
        };
        (named(USER), named(GROUP), any::<bool>(), proptest::array::uniform4(0..8u16)).prop_map(
            |(users, groups, masked, [owner, group, mask, others])| {
                let has_mask = masked || !users.is_empty() || !groups.is_empty();
                let mut entries = vec![(OWNER, owner, NOBODY)];
                entries.extend(users);
                entries.push((OWNING_GROUP, group, NOBODY));
                entries.extend(groups);
                entries.extend(has_mask.then_some((MASK, mask, NOBODY)));
                entries.push((OTHERS, others, NOBODY));
                entries
            },
        )
    }

    proptest! {
        #[test]
        fn access_is_that_of_the_standard(
            entries in any_entries(),
            owned in (0..6u32, 0..6u32),
            uid in 0..7u32,
            groups in proptest::collection::vec(0..6u32, 0..4),
            wanted in 0..8u16,
        ) {
            let acl = Acl::decode(&list(&entries)).unwrap().unwrap();
            let may = acl.permits(owned, |user| user == uid, |group| groups.contains(&group), wanted.into());
            prop_assert_eq!(may, reference(&entries, owned, uid, &groups, wanted));
            prop_assert_eq!(acl.encode(), list(&entries));
            let mode = acl.mode();
            prop_assert_eq!(acl.clone().with_mode(mode), acl);
        }

        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..80), tags in any::<bool>()) {
            let mut bytes = bytes;
            if tags && bytes.len() >= HEADER_BYTES {
                bytes[..4].copy_from_slice(&VERSION.to_le_bytes());
                for entry in bytes[4..].chunks_mut(ENTRY_BYTES) {
                    entry[0] = 1 << (entry[0] % 6);
                    entry.iter_mut().skip(1).take(1).for_each(|high| *high = 0);
                    entry.iter_mut().skip(2).take(1).for_each(|rights| *rights %= 8);
                    entry.iter_mut().skip(3).take(1).for_each(|high| *high = 0);
                }
            }
            if let Ok(Some(acl)) = Acl::decode(&bytes) {
                prop_assert_eq!(Acl::decode(&acl.encode()), Ok(Some(acl)));
            }
        }
    }
}
