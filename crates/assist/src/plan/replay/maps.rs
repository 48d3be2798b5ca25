//! A run whose reads are touches of a memory map: the program tells of none of them, and the manager looks at what came into
//! memory.

use std::collections::BTreeSet;

use impresario_device::State;

use super::*;

const PAGE_BYTES: u64 = 4096;
/// What the kernel maps around a touched page of what is in memory.
const MAPPED_AROUND_BYTES: u64 = 64 << 10;
/// A touch of what is in memory.
const TOUCH_NS: u64 = 1_000;

/// Replays it; of each file with hints all is mapped.
pub(in crate::plan) fn replay_mapped(run: &Run, device: &Device, memory_bytes: u64, entries: &Entries) -> Outcome {
    let guide = |(file, hinted): (&usize, &Hinted<'_>)| {
        let size = run.sizes[*file];
        let mut guide = Guide::new(*hinted, size, device, StandDown::default(), &DeviceCost::default());
        guide.advisor.mapped(1, 0..size, 0, &mut |_| true);
        (*file, guide)
    };
    let guides = entries.iter().map(guide).collect();
    let mut mapped = Mapped { node: Node::new(run, device, memory_bytes, guides), table: BTreeSet::new() };
    let elapsed = foresight::replay(run, &mut mapped);
    mapped.node.outcome(elapsed)
}

struct Mapped<'a> {
    node: Node<'a>,
    /// The pages in the program's page table.
    table: BTreeSet<(usize, u64)>,
}

impl Storage for Mapped<'_> {
    fn read(&mut self, now_ns: u64, _: Reader, access: &Access) -> ReadEnd {
        let mut end_ns = now_ns;
        for page in pages(&access.bytes).step_by(PAGE_BYTES as usize) {
            end_ns = self.touched(end_ns, access.file, page);
        }
        ReadEnd { end_ns, learn_ns: None }
    }

    fn learn(&mut self, _: u64, _: Reader, _: &Access, _: bool) {}
}

impl Mapped<'_> {
    /// When the program goes on that touches this page.
    fn touched(&mut self, now_ns: u64, file: usize, page: u64) -> u64 {
        self.look(now_ns);
        self.node.settle(now_ns);
        if self.table.contains(&(file, page)) {
            return now_ns + TOUCH_NS;
        }
        let cache = |node: &Node<'_>, page: u64| node.cache.has(file as u32, page);
        if cache(&self.node, page) {
            let start = page / MAPPED_AROUND_BYTES * MAPPED_AROUND_BYTES;
            let around = (start..start + MAPPED_AROUND_BYTES).step_by(PAGE_BYTES as usize);
            self.table.extend(around.filter(|page| cache(&self.node, *page)).map(|page| (file, page)));
            return now_ns + TOUCH_NS;
        }
        if self.node.ready_ns(file as u32, &(page..page + PAGE_BYTES)) == 0 {
            let ahead = self.node.device.read_ahead_bytes;
            let start = page.saturating_sub(ahead / 2) / PAGE_BYTES * PAGE_BYTES;
            let end = (start + ahead.max(PAGE_BYTES)).min(self.node.sizes[file].next_multiple_of(PAGE_BYTES));
            for missing in self.node.cache.claim(file as u32, start, end, true) {
                self.node.request(now_ns, file as u32, missing);
            }
        }
        let end_ns = now_ns.max(self.node.ready_ns(file as u32, &(page..page + PAGE_BYTES)));
        self.look(end_ns);
        self.node.cache.touch(file as u32, page, page + PAGE_BYTES);
        self.table.insert((file, page));
        end_ns + TOUCH_NS
    }

    /// What the manager does until then.
    fn look(&mut self, until_ns: u64) {
        let next = |node: &Node<'_>| {
            let looks = node.guides.iter().filter_map(|(file, guide)| Some((guide.advisor.look_at_map_ns()?, *file)));
            looks.min().filter(|(at_ns, _)| *at_ns <= until_ns)
        };
        while let Some((at_ns, file)) = next(&self.node) {
            self.node.tell(at_ns);
            self.node.settle(at_ns);
            let Mapped { node: Node { guides, cache, .. }, table } = self;
            let Some(guide) = guides.get_mut(&file) else { continue };
            let mut cached = |range: Range<u64>| {
                let (mut at, mut there) = (range.start, 0);
                while at < range.end {
                    at = match cache.look(file as u32, at, range.end) {
                        // What is on its way counts.
                        State::Present(to) | State::Coming(to) => {
                            there += to - at;
                            to
                        }
                        State::Missing(to) => to,
                    };
                }
                Some(there)
            };
            let actions = guide.advisor.look_at_map(at_ns, &mut cached, &mut |_| true);
            if let Some(parts) = guide.advisor.take_page_table_wish(at_ns) {
                let is_touched = |part: &Range<u64>| table.range((file, part.start)..(file, part.end)).next().is_some();
                let told: Vec<_> = parts.into_iter().map(|part| (part.clone(), is_touched(&part))).collect();
                guide.advisor.page_table_is_known(Some(&told));
            }
            self.node.perform(at_ns + HINT_DELAY_NS, file, actions);
        }
    }
}
