//! On which data servers the bytes of a file lie, as file systems tell it in extended attributes or by an ioctl.
//!
//! | File system | Attribute or ioctl | What it tells |
//! |---|---|---|
//! | Lustre | `lustre.lov` | stripe size and the OST of each stripe; of a composite file its longest component that has objects |
//! | CephFS | `ceph.file.layout` | stripe unit, count and object size; *not* the OSDs: objects count as dealt in turn |
//! | GlusterFS | `trusted.glusterfs.pathinfo` | the brick (of replicas the first), whose number is a hash of its name |
//! | BeeGFS | `BEEGFS_IOC_GET_STRIPEINFO`, `…_STRIPETARGET_V2` | chunk size and the storage target, or group of mirrors, of each chunk |
//!
//! Others tell nothing (GPFS, NFS), or no servers (OrangeFS: which server a datafile's handle is on is in that file system's own
//! configuration); for these our configuration says it. The readers of
//! attributes take any bytes: what makes no sense is no answer. Formats: `lustre_user.h` (struct lov_user_md_v1, _v3,
//! lov_comp_md_v1), Ceph's documentation "File layouts", GlusterFS's of `pathinfo`, `beegfs_ioctl.h`.

use std::os::fd::AsRawFd;

use impresario_layout::Layout;
use rustix::fs::{Mode, OFlags};

use crate::Placement;
use crate::gluster::pathinfo;

/// `LL_SUPER_MAGIC`, `BEEGFS_MAGIC`, `CEPH_SUPER_MAGIC` and `FUSE_SUPER_MAGIC`, statfs(2).
const LUSTRE: u64 = 0x0bd0_0bd0;
const BEEGFS: u64 = 0x1983_0326;
const CEPH: u64 = 0x00c3_6400;
const FUSE: u64 = 0x6573_5546;

/// Longest attribute that is looked at: a Lustre file over 2000 OSTs has 48 KiB.
const VALUE_MAX_BYTES: usize = 64 << 10;

/// How to learn of placements on one file system.
#[derive(Debug, Clone, Copy)]
pub(super) struct Source {
    kind: u64,
    /// Data servers that objects are dealt to where only that is known.
    data_servers: u16,
}

impl Source {
    /// For the file system of this type (statfs(2)).
    pub(super) fn new(kind: u64, data_servers: u16) -> Source {
        Source { kind: kind & 0xffff_ffff, data_servers: data_servers.max(1) }
    }

    /// What the file system says of a file; `path` leads to it.
    pub(super) fn ask(&self, path: &str) -> Option<Placement> {
        let get = |name: &str| {
            let mut value = vec![0; VALUE_MAX_BYTES];
            let len = rustix::fs::getxattr(path, name, &mut value[..]).ok()?;
            value.truncate(len);
            Some(value)
        };
        let ceph = || ceph(&get("ceph.file.layout")?, self.data_servers);
        match self.kind {
            LUSTRE => lustre(&get("lustre.lov")?),
            BEEGFS => {
                let file = rustix::fs::open(path, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty());
                let file = file.ok()?;
                beegfs(&mut |question| {
                    let (number, address) = question.ioctl();
                    // SAFETY: `address` is that of a live structure as large as the number says, which BeeGFS fills; this is a file
                    // of BeeGFS, and other file systems refuse the number without looking.
                    unsafe { libc::ioctl(file.as_raw_fd(), number as _, address) == 0 }
                })
            }
            CEPH => ceph(),
            FUSE => get("trusted.glusterfs.pathinfo").map_or_else(ceph, |value| glusterfs(&value)),
            _ => None,
        }
    }
}

/// A placement over these data servers in turn.
fn striped(ssize_bytes: u64, servers: Vec<u32>) -> Option<Placement> {
    let count = u16::try_from(servers.len()).ok()?;
    let layout = Layout::new(0, count, u32::try_from(ssize_bytes).ok()?, count).ok()?;
    Some(Placement { layout, servers: servers.into() })
}

fn number<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at.checked_add(N)?)?.try_into().ok()
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    number(bytes, at).map(u32::from_le_bytes)
}

/// Reads Lustre's attribute.
fn lustre(bytes: &[u8]) -> Option<Placement> {
    const COMPOSITE: u32 = 0x0bd6_0bd0;
    const HEADER_BYTES: usize = 32;
    const ENTRY_BYTES: usize = 48;
    /// `LCME_FL_INIT`: it has objects.
    const INIT: u32 = 0x10;
    if u32_at(bytes, 0)? != COMPOSITE {
        return lustre_plain(bytes);
    }
    let count = number(bytes, 14).map(u16::from_le_bytes)?;
    let mut longest = None;
    for n in 0..usize::from(count) {
        let entry = bytes.get(HEADER_BYTES + n * ENTRY_BYTES..HEADER_BYTES + (n + 1) * ENTRY_BYTES)?;
        let (start, end) = (u64::from_le_bytes(number(entry, 8)?), u64::from_le_bytes(number(entry, 16)?));
        let (offset, len) = (u32_at(entry, 24)? as usize, u32_at(entry, 28)? as usize);
        let length = end.saturating_sub(start);
        if u32_at(entry, 4)? & INIT == 0 || longest.as_ref().is_some_and(|(most, _)| *most >= length) {
            continue;
        }
        let component = offset.checked_add(len).and_then(|end| bytes.get(offset..end));
        if let Some(placement) = component.and_then(lustre_plain) {
            longest = Some((length, placement));
        }
    }
    longest.map(|(_, placement)| placement)
}

/// A file, or a component, that is striped in one way.
fn lustre_plain(bytes: &[u8]) -> Option<Placement> {
    const V1: u32 = 0x0bd1_0bd0;
    const V3: u32 = 0x0bd3_0bd0;
    /// `LOV_PATTERN_RAID0`; others (data on the metadata server, released, mirrored) have no stripes to tell.
    const RAID0: u32 = 1;
    const OBJECT_BYTES: usize = 24;
    let objects_at = match u32_at(bytes, 0)? {
        V1 => 32,
        V3 => 48, // the name of a pool comes before
        _ => return None,
    };
    if u32_at(bytes, 4)? != RAID0 {
        return None;
    }
    let (ssize_bytes, count) = (u32_at(bytes, 24)?, u16::from_le_bytes(number(bytes, 28)?));
    let server = |n: usize| u32_at(bytes, objects_at + n * OBJECT_BYTES + 20);
    let servers: Option<Vec<u32>> = (0..usize::from(count)).map(server).collect();
    striped(ssize_bytes.into(), servers?)
}

/// Reads CephFS's attribute: `stripe_unit=… stripe_count=… object_size=… pool=…`.
fn ceph(bytes: &[u8], data_servers: u16) -> Option<Placement> {
    let text = std::str::from_utf8(bytes).ok()?.trim_end_matches('\0');
    let value = |key: &str| -> Option<u64> {
        let pair = text.split_ascii_whitespace().find_map(|pair| pair.strip_prefix(key)?.strip_prefix('='));
        pair?.parse().ok().filter(|value| *value > 0)
    };
    let (unit, count, object) = (value("stripe_unit")?, value("stripe_count")?, value("object_size")?);
    // Units go round over `count` objects at a time; with one object at a time it is the objects that follow one another.
    let ssize_bytes = if count == 1 { object } else { unit };
    striped(ssize_bytes, (0..u32::from(data_servers)).collect())
}

/// Reads GlusterFS's attribute.
fn glusterfs(bytes: &[u8]) -> Option<Placement> {
    // Every I/O node must give a brick the same number; of replicas the first stands for all.
    let brick = pathinfo::bricks(bytes).into_iter().next()?;
    Some(Placement::one(pathinfo::number(&brick)))
}

/// `BeegfsIoctl_GetStripeInfo_Arg`.
#[repr(C)]
#[derive(Default)]
struct StripeInfo {
    pattern: u32,
    chunk_bytes: u32,
    targets: u16,
}

/// `BeegfsIoctl_GetStripeTargetV2_Arg`.
#[repr(C)]
struct StripeTarget {
    /// Asked for.
    index: u32,
    /// The storage target, or the group of two that mirror one another.
    target_or_group: u32,
    primary_target: u32,
    secondary_target: u32,
    primary_node: u32,
    secondary_node: u32,
    names: [u8; 512],
}

/// What BeeGFS is asked.
enum Question<'a> {
    Info(&'a mut StripeInfo),
    Target(&'a mut StripeTarget),
}

impl Question<'_> {
    /// The number of the ioctl and what it fills.
    fn ioctl(self) -> (u64, *mut libc::c_void) {
        // `_IOR('f', number, structure)`.
        let read = |number: u64, len: usize| 2 << 30 | (len as u64) << 16 | u64::from(b'f') << 8 | number;
        match self {
            Question::Info(info) => (read(25, size_of::<StripeInfo>()), std::ptr::from_mut(info).cast()),
            Question::Target(target) => (read(26, size_of::<StripeTarget>()), std::ptr::from_mut(target).cast()),
        }
    }
}

/// Asks BeeGFS of a file; `ask` is whether it answers.
fn beegfs(ask: &mut dyn FnMut(Question<'_>) -> bool) -> Option<Placement> {
    /// Chunks go round the targets, or groups of two targets that mirror one another.
    const RAID0: u32 = 1;
    const BUDDY_MIRROR: u32 = 3;
    let mut info = StripeInfo::default();
    if !ask(Question::Info(&mut info)) || ![RAID0, BUDDY_MIRROR].contains(&info.pattern) {
        return None;
    }
    let server = |index: u16| {
        let mut target = StripeTarget {
            index: index.into(),
            target_or_group: 0,
            primary_target: 0,
            secondary_target: 0,
            primary_node: 0,
            secondary_node: 0,
            names: [0; 512],
        };
        ask(Question::Target(&mut target)).then_some(target.target_or_group)
    };
    let servers: Option<Vec<u32>> = (0..info.targets).map(server).collect();
    striped(info.chunk_bytes.into(), servers?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As a BeeGFS that answers so.
    fn beegfs_with(pattern: u32, chunk_bytes: u32, targets: &[u32]) -> Option<Placement> {
        beegfs(&mut |question| match question {
            Question::Info(info) => {
                *info = StripeInfo { pattern, chunk_bytes, targets: targets.len() as u16 };
                true
            }
            Question::Target(target) => {
                let told = targets.get(target.index as usize).filter(|told| **told != 0);
                target.target_or_group = told.copied().unwrap_or(9);
                told.is_some()
            }
        })
    }

    #[test]
    fn beegfs_tells_the_targets_in_their_order() {
        assert_eq!(servers(beegfs_with(1, 512 << 10, &[101, 203, 102])), Some((512 << 10, vec![101, 203, 102])));
        assert_eq!(servers(beegfs_with(3, 1 << 20, &[7])), Some((1 << 20, vec![7])));
        // No targets, no chunk, a pattern that is not known, a target of which nothing is told.
        for (pattern, chunk_bytes, targets) in
            [(1, 1 << 20, &[][..]), (1, 0, &[1]), (2, 1 << 20, &[1]), (1, 1 << 20, &[1, 0])]
        {
            assert_eq!(beegfs_with(pattern, chunk_bytes, targets), None);
        }
        assert_eq!(beegfs(&mut |_| false), None);
    }

    /// The numbers that the kernel's module compares with: they contain the sizes of the structures.
    #[test]
    fn beegfs_is_asked_by_its_numbers() {
        let mut info = StripeInfo::default();
        assert_eq!(Question::Info(&mut info).ioctl().0, 0x800c_6619);
        assert_eq!(size_of::<StripeTarget>(), 6 * 4 + 2 * 256);
        // Any other file system refuses them.
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        let answers = |number: u64| {
            let mut room = [0u8; 1024];
            // SAFETY: the numbers name structures that are smaller than the room.
            unsafe { libc::ioctl(file.as_raw_fd(), number as _, room.as_mut_ptr()) == 0 }
        };
        assert!(!answers(0x800c_6619) && !answers(0x8218_661a));
    }

    /// A plain layout as `lustre_user.h` defines it.
    fn plain(magic: u32, pattern: u32, ssize: u32, osts: &[u32]) -> Vec<u8> {
        let mut bytes = [magic, pattern].map(u32::to_le_bytes).concat();
        bytes.extend([0xab; 16]); // object number and sequence
        bytes.extend(ssize.to_le_bytes());
        bytes.extend((osts.len() as u16).to_le_bytes());
        bytes.extend(7u16.to_le_bytes()); // generation
        if magic == 0x0bd3_0bd0 {
            bytes.extend(b"pool.name.of.16\0");
        }
        for ost in osts {
            bytes.extend([0xcd; 16]);
            bytes.extend([3, *ost].map(u32::to_le_bytes).concat());
        }
        bytes
    }

    /// A composite one: components with flags and extents.
    fn composite(components: &[(u32, u64, u64, Vec<u8>)]) -> Vec<u8> {
        let mut bytes = [0x0bd6_0bd0_u32, 0, 1].map(u32::to_le_bytes).concat();
        bytes.extend([0, components.len() as u16].map(u16::to_le_bytes).concat());
        bytes.resize(32, 0);
        let mut at = 32 + 48 * components.len();
        for (id, (flags, start, end, component)) in (1u32..).zip(components) {
            bytes.extend([id, *flags].map(u32::to_le_bytes).concat());
            bytes.extend([*start, *end].map(u64::to_le_bytes).concat());
            bytes.extend([at as u32, component.len() as u32].map(u32::to_le_bytes).concat());
            bytes.extend([0; 16]);
            at += component.len();
        }
        components.iter().for_each(|(.., component)| bytes.extend(component));
        bytes
    }

    fn servers(placement: Option<Placement>) -> Option<(u32, Vec<u32>)> {
        placement.map(|placement| (placement.layout.ssize_bytes, placement.servers.to_vec()))
    }

    #[test]
    fn lustre_tells_the_osts_in_their_order() {
        for magic in [0x0bd1_0bd0, 0x0bd3_0bd0] {
            let told = lustre(&plain(magic, 1, 1 << 20, &[5, 17, 2]));
            assert_eq!(servers(told), Some((1 << 20, vec![5, 17, 2])));
        }
        // No objects yet, data on the metadata server, released.
        for (pattern, osts) in [(1, &[][..]), (0x100, &[0]), (0x8000_0001, &[1])] {
            assert_eq!(lustre(&plain(0x0bd1_0bd0, pattern, 1 << 20, osts)), None);
        }
    }

    #[test]
    fn of_a_composite_file_the_longest_part_counts() {
        let part = |osts: &[u32]| plain(0x0bd1_0bd0, 1, 1 << 20, osts);
        let told = lustre(&composite(&[
            (0x10, 0, 1 << 20, part(&[1])),
            (0x10, 1 << 20, 1 << 30, part(&[2, 3])),
            (0, 1 << 30, u64::MAX, part(&[])), // not made yet
        ]));
        assert_eq!(servers(told), Some((1 << 20, vec![2, 3])));
        let on_mdt = plain(0x0bd1_0bd0, 0x100, 1 << 20, &[]);
        assert_eq!(lustre(&composite(&[(0x10, 0, 1 << 20, on_mdt)])), None);
    }

    #[test]
    fn ceph_tells_how_objects_follow() {
        let told = ceph(b"stripe_unit=65536 stripe_count=4 object_size=1048576 pool=cephfs_data", 4);
        assert_eq!(servers(told), Some((65_536, vec![0, 1, 2, 3])));
        let told = ceph(b"stripe_unit=4194304 stripe_count=1 object_size=4194304 pool=data\0", 2);
        assert_eq!(servers(told), Some((4 << 20, vec![0, 1])));
        assert_eq!(ceph(b"stripe_unit=0 stripe_count=1 object_size=4194304", 2), None);
    }

    #[test]
    fn glusterfs_tells_the_brick() {
        let of = |text: &str| glusterfs(text.as_bytes()).map(|placement| placement.servers[0]);
        let one = of("(<DISTRIBUTE:vol-dht> <POSIX(/bricks/1):node1:/bricks/1/dir/file>)");
        assert!(one.is_some());
        assert_eq!(one, of("(<DISTRIBUTE:vol-dht> <POSIX(/bricks/1):node1:/bricks/1/other>)"));
        assert_ne!(one, of("(<DISTRIBUTE:vol-dht> <POSIX(/bricks/2):node1:/bricks/2/dir/file>)"));
        // The first of the replicas.
        let replicas =
            "(<DISTRIBUTE:v-dht> (<REPLICATE:v-r> <POSIX(/bricks/1):node1:/bricks/1/f> <POSIX(/b):n2:/b/f>))";
        assert_eq!(one, of(replicas));
        assert_eq!(of("nothing"), None);
    }

    #[test]
    fn nonsense_is_no_answer() {
        let mut random = impresario_base::random::Random::new(1);
        let good = [
            plain(0x0bd3_0bd0, 1, 1 << 20, &[5, 17, 2]),
            composite(&[(0x10, 0, u64::MAX, plain(0x0bd1_0bd0, 1, 1 << 16, &[1, 2]))]),
            b"stripe_unit=65536 stripe_count=4 object_size=1048576 pool=x".to_vec(),
            b"(<DISTRIBUTE:v> <POSIX(/b):h:/b/f>)".to_vec(),
        ];
        for _ in 0..20_000 {
            let mut bytes = good[random.below(4) as usize].clone();
            for _ in 0..random.below(6) {
                let at = random.below(bytes.len() as u64) as usize;
                bytes[at] = random.below(256) as u8;
            }
            bytes.truncate(random.below(bytes.len() as u64 + 1) as usize);
            for placement in [lustre(&bytes), ceph(&bytes, 4), glusterfs(&bytes)].into_iter().flatten() {
                assert!(placement.layout.check().is_ok());
                assert_eq!(placement.servers.len(), usize::from(placement.layout.servers));
            }
        }
    }
}
