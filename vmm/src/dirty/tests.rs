use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use proptest::prelude::*;
use virtio_devices::{BackendKind, GuestMap, SharedLog};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

use super::*;
use crate::arch::x86_64::layout;
use crate::arch::x86_64::regs::Entry;
use crate::kvm::{Kvm, Vcpu, Vm};

const PAGE: u64 = 4096;
/// Size of memory: the last word of KVM's log is partial.
const LEN: u64 = (2 << 20) + 3 * PAGE;

/// A VM with memory, and a vCPU that increments the first word of pages 2 to 4 in a loop.
fn guest() -> (GuestMap, Arc<Vm>, Vcpu) {
    let map = GuestMap::from_ranges(&[(GuestAddress(0), LEN as usize)]).unwrap();
    let vm = Arc::new(Kvm::open().unwrap().create_vm(layout::KVM_TSS).unwrap());
    // again: inc dword [0x2000]; inc dword [0x3000]; inc dword [0x4000]; jmp again
    let inc = |page: u8| [0xff, 0x05, 0x00, page << 4, 0x00, 0x00];
    let code = [&inc(2)[..], &inc(3), &inc(4), &[0xeb, 0xec]].concat();
    map.write_slice(&code, GuestAddress(0x1000)).unwrap();
    // SAFETY: the memory is returned together with the VM, and lasts for as long as the tests use that.
    unsafe { vm.set_memory(0, 0, map.get_host_address(GuestAddress(0)).unwrap(), LEN) }.unwrap();
    let vcpu = vm.create_vcpu(0).unwrap();
    let mut sregs = vcpu.sregs().unwrap();
    Entry::Pvh(0x1000).set_sregs(&mut sregs);
    vcpu.set_sregs(&sregs).unwrap();
    vcpu.set_regs(&Entry::Pvh(0x1000).regs()).unwrap();
    (map, vm, vcpu)
}

/// Runs the vCPU for one more round.
fn run(map: &GuestMap, vcpu: &mut Vcpu) {
    let count = || map.read_obj::<u32>(GuestAddress(0x4000)).unwrap();
    let (before, exit) = (count(), vcpu.immediate_exit() as usize);
    let done = &AtomicBool::new(false);
    std::thread::scope(|scope| {
        // SAFETY: `pthread_self` has no conditions.
        let pthread = unsafe { libc::pthread_self() };
        scope.spawn(move || {
            while !done.load(Ordering::Acquire) {
                if count() > before + 1 {
                    // SAFETY: the byte is the vCPU's, which outlives this scope; the thread runs until `done`.
                    unsafe {
                        (exit as *mut u8).write_volatile(1);
                        libc::pthread_kill(pthread, libc::SIGRTMIN());
                    }
                }
                std::thread::yield_now();
            }
        });
        let _ = vcpu.run().unwrap();
        done.store(true, Ordering::Release);
    });
    // SAFETY: the byte is the vCPU's, and the other thread, which may have set it after the vCPU left, has ended.
    unsafe { (exit as *mut u8).write_volatile(0) };
}

fn pages(set: &mut PageSet) -> Vec<u64> {
    let (mut place, mut all) = ((0, 0), Vec::new());
    while let Some(chunk) = set.take(&mut place) {
        all.extend(chunk.runs().into_iter().flat_map(|(start, len)| start / PAGE..(start + len) / PAGE));
    }
    all
}

/// Installs the handler of the signal that interrupts a vCPU.
fn with_signal() {
    // The handler of all vCPU threads: other tests of this process have some as well.
    use vmm_sys_util::signal::{SIGRTMIN, register_signal_handler};
    register_signal_handler(SIGRTMIN(), crate::vcpu::cpu::leave_guest).unwrap();
}

#[test]
fn pages_written_by_a_vcpu_stay_dirty_until_released() {
    with_signal();
    let (map, vm, mut vcpu) = guest();
    run(&map, &mut vcpu);
    let mut log = DirtyLog::start(vec![Box::new(Vcpus::new(vm))]).unwrap();
    // All pages are sent once.
    let (mut first, mut place) = (PageSet::all(&map), (0, 0));
    log.collect(&mut first).unwrap();
    assert_eq!(first.count(), LEN / PAGE);
    while let Some(chunk) = first.take(&mut place) {
        log.release(&chunk).unwrap();
    }
    let mut collect = || {
        let mut set = PageSet::none(&map);
        log.collect(&mut set).unwrap();
        set
    };
    assert_eq!(pages(&mut collect()), [] as [u64; 0]);
    run(&map, &mut vcpu);
    assert_eq!(pages(&mut collect()), [2, 3, 4]);
    assert_eq!(pages(&mut collect()), [2, 3, 4], "not released");
    let chunk = collect().take(&mut (0, 0)).unwrap();
    log.release(&Chunk { words: vec![0b1100], ..chunk }).unwrap();
    let mut left = PageSet::none(&map);
    log.collect(&mut left).unwrap();
    assert_eq!(pages(&mut left), [4]);
}

#[test]
fn a_log_that_has_ended_costs_nothing_and_can_begin_again() {
    with_signal();
    let (map, vm, mut vcpu) = guest();
    for _ in 0..2 {
        let mut log = DirtyLog::start(vec![Box::new(Vcpus::new(Arc::clone(&vm)))]).unwrap();
        let mut set = PageSet::none(&map);
        log.collect(&mut set).unwrap();
        run(&map, &mut vcpu);
        drop(log);
        let slot = vm.ram()[0];
        assert!(vm.written(&slot).is_err(), "KVM keeps no log");
    }
}

/// A writer outside of this process's control, with a shared log, like vhost.
struct Peer {
    map: GuestMap,
    log: Arc<SharedLog>,
}

impl Peer {
    fn write(&self, page: u64, value: u64) {
        let host = self.map.get_host_address(GuestAddress(page * PAGE)).unwrap();
        // SAFETY: the page is a part of the mapping, to which there are no references.
        unsafe { host.cast::<u64>().write_volatile(value) };
        self.log.set(page);
    }
}

struct PeerSource(Arc<SharedLog>);

impl DirtySource for PeerSource {
    fn name(&self) -> &'static str {
        "the peer writes"
    }

    fn start(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn collect(&mut self, pages: &mut PageSet) -> io::Result<()> {
        self.0.take(|first, bits| pages.add(first, bits));
        Ok(())
    }

    fn stop(&mut self) {}
}

/// Copies memory while a vCPU, a thread of this process and a peer write to it, with all sources except that at index
/// `without`. Returns the pages that differ from their copies after the final pass.
fn migrate(without: Option<usize>) -> Vec<u64> {
    with_signal();
    let (map, vm, mut vcpu) = guest();
    let shared = Arc::new(SharedLog::new(&map).unwrap());
    let peer = Peer { map: map.clone(), log: Arc::clone(&shared) };
    let all: Vec<Box<dyn DirtySource>> =
        vec![Box::new(Vcpus::new(vm)), Box::new(OwnThreads::new(&map)), Box::new(PeerSource(shared))];
    let sources = all.into_iter().enumerate().filter(|(index, _)| Some(*index) != without).map(|(_, source)| source);
    let mut log = DirtyLog::start(sources.collect()).unwrap();
    let mut copy = vec![0; LEN as usize];
    let (stop, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
    let mut pass = |log: &mut DirtyLog, set: &mut PageSet| {
        log.collect(set).unwrap();
        let mut place = (0, 0);
        while let Some(chunk) = set.take(&mut place) {
            log.release(&chunk).unwrap();
            for (start, len) in chunk.runs() {
                map.read_slice(&mut copy[start as usize..(start + len) as usize], GuestAddress(start)).unwrap();
            }
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for value in 1.. {
                if stop.load(Ordering::Acquire) {
                    break;
                }
                (0x20..0x30).for_each(|page| map.write_obj(value, GuestAddress(page * PAGE)).unwrap());
                (0x40..0x50).for_each(|page| peer.write(page, value));
                rounds.store(value, Ordering::Release);
            }
        });
        pass(&mut log, &mut PageSet::all(&map));
        for _ in 0..10 {
            let seen = rounds.load(Ordering::Acquire);
            run(&map, &mut vcpu);
            while rounds.load(Ordering::Acquire) == seen {
                std::thread::yield_now();
            }
            pass(&mut log, &mut PageSet::none(&map));
        }
        run(&map, &mut vcpu);
        let seen = rounds.load(Ordering::Acquire);
        while rounds.load(Ordering::Acquire) == seen {
            std::thread::yield_now();
        }
        stop.store(true, Ordering::Release);
    });
    // Final collection.
    pass(&mut log, &mut PageSet::none(&map));
    let differs = |page: &u64| {
        let mut now = [0; PAGE as usize];
        map.read_slice(&mut now, GuestAddress(page * PAGE)).unwrap();
        now[..] != copy[(page * PAGE) as usize..((page + 1) * PAGE) as usize]
    };
    (0..LEN / PAGE).filter(differs).collect()
}

#[test]
fn copy_equals_memory_unless_a_dirty_source_is_switched_off() {
    assert_eq!(migrate(None), [] as [u64; 0]);
    let missed = [vec![2, 3, 4], (0x20..0x30).collect(), (0x40..0x50).collect::<Vec<_>>()];
    for (source, missed) in missed.into_iter().enumerate() {
        assert_eq!(migrate(Some(source)), missed, "source {source}");
    }
}

/// A source that fails at the start, or later.
struct Failing(bool);

impl DirtySource for Failing {
    fn name(&self) -> &'static str {
        "a failing source writes"
    }

    fn start(&mut self) -> io::Result<()> {
        if self.0 { Err(io::ErrorKind::Unsupported.into()) } else { Ok(()) }
    }

    fn collect(&mut self, _pages: &mut PageSet) -> io::Result<()> {
        Err(io::ErrorKind::BrokenPipe.into())
    }

    fn stop(&mut self) {}
}

#[test]
fn failing_source_is_named_and_stops_the_sources_before_it() {
    let map = GuestMap::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
    let error = DirtyLog::start(vec![Box::new(OwnThreads::new(&map)), Box::new(Failing(true))]).err().unwrap();
    assert_eq!(error.to_string(), "cannot log what a failing source writes to guest memory: unsupported");
    // The failed log has released it.
    let mut log = DirtyLog::start(vec![Box::new(OwnThreads::new(&map)), Box::new(Failing(false))]).unwrap();
    let error = log.collect(&mut PageSet::none(&map)).unwrap_err().to_string();
    assert_eq!(error, "cannot log what a failing source writes to guest memory: broken pipe");
}

#[test]
fn backends_that_there_are_none_of_note_nothing() {
    let map = GuestMap::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
    let sources = [BackendKind::VhostNet, BackendKind::VhostUser]
        .map(|kind| Box::new(Backends::new(kind, Box::new(Vec::new), &map)) as Box<dyn DirtySource>);
    let mut log = DirtyLog::start(sources.into()).unwrap();
    let mut set = PageSet::none(&map);
    log.collect(&mut set).unwrap();
    assert_eq!(set.count(), 0);
}

/// Two regions; the second does not begin at a multiple of 64 pages.
fn uneven() -> GuestMap {
    GuestMap::from_ranges(&[(GuestAddress(0), 70 << 12), (GuestAddress(100 << 12), 200 << 12)]).unwrap()
}

#[test]
fn all_pages_are_those_of_the_regions() {
    let map = uneven();
    let mut set = PageSet::all(&map);
    assert_eq!(set.count(), 270);
    assert_eq!(pages(&mut set), (0..70).chain(100..300).collect::<Vec<_>>());
    assert_eq!(set, PageSet::none(&map));
    assert_eq!(map.iter().map(GuestMemoryRegion::len).sum::<u64>(), 270 << 12);
}

proptest! {
    #[test]
    fn dirty_bits_at_any_offset_map_to_the_pages_that_exist(
        groups in proptest::collection::vec((0..6u64, any::<u64>()), 0..6)
    ) {
        let mut set = PageSet::none(&uneven());
        let mut expected = std::collections::BTreeSet::new();
        for (group, bits) in groups {
            set.add(group * 64, bits);
            let numbers = (0..64).filter(|bit| bits & 1 << bit != 0).map(|bit| group * 64 + bit);
            expected.extend(numbers.filter(|page| (0..70).chain(100..300).any(|known| known == *page)));
        }
        prop_assert_eq!(pages(&mut set), expected.into_iter().collect::<Vec<_>>());
    }
}

#[test]
fn chunks_come_in_order_and_continue_where_they_stopped() {
    let map = GuestMap::from_ranges(&[(GuestAddress(0), (3 * CHUNK_PAGES as usize) << 12)]).unwrap();
    let (mut set, mut place) = (PageSet::all(&map), (0, 0));
    let starts: Vec<_> =
        std::iter::from_fn(|| set.take(&mut place)).map(|chunk| (chunk.first, chunk.count())).collect();
    assert_eq!(starts, [(0, CHUNK_PAGES), (CHUNK_PAGES, CHUNK_PAGES), (2 * CHUNK_PAGES, CHUNK_PAGES)]);
    assert_eq!((place, set.take(&mut place)), ((0, 0), None));
    set.add(0, 0b1001_1100);
    assert_eq!(set.take(&mut place).unwrap().runs(), [(2 * PAGE, 3 * PAGE), (7 * PAGE, PAGE)]);
}

#[test]
fn memory_slots_come_and_go_while_writes_are_logged() {
    const REGION: u64 = 1 << 30;
    const PART: u64 = 2 << 20;
    with_signal();
    let map =
        GuestMap::from_ranges(&[(GuestAddress(0), LEN as usize), (GuestAddress(REGION), 4 * PART as usize)]).unwrap();
    let vm = Arc::new(Kvm::open().unwrap().create_vm(layout::KVM_TSS).unwrap());
    // again: inc dword [0x4000]; inc dword [REGION + PART + 0x3000]; jmp again
    let code =
        [&[0xff, 0x05, 0x00, 0x40, 0x00, 0x00][..], &[0xff, 0x05, 0x00, 0x30, 0x20, 0x40], &[0xeb, 0xf2]].concat();
    map.write_slice(&code, GuestAddress(0x1000)).unwrap();
    let host = |address| map.get_host_address(GuestAddress(address)).unwrap();
    let part = |number: u32, len| {
        let guest = REGION + u64::from(number) * PART;
        // SAFETY: the memory lasts for longer than the VM.
        unsafe { vm.set_memory(100 + number, guest, host(guest), len) }.unwrap();
    };
    // SAFETY: as above.
    unsafe { vm.set_memory(0, 0, host(0), LEN) }.unwrap();
    part(1, PART);
    let mut vcpu = vm.create_vcpu(0).unwrap();
    let mut sregs = vcpu.sregs().unwrap();
    Entry::Pvh(0x1000).set_sregs(&mut sregs);
    vcpu.set_sregs(&sregs).unwrap();
    vcpu.set_regs(&Entry::Pvh(0x1000).regs()).unwrap();
    let mut log = DirtyLog::start(vec![Box::new(Vcpus::new(Arc::clone(&vm)))]).unwrap();
    let written = (REGION + PART) / PAGE + 3;
    // Releases all dirty pages and returns them.
    let collect = |log: &mut DirtyLog| {
        let (mut set, mut place, mut all) = (PageSet::none(&map), (0, 0), Vec::new());
        log.collect(&mut set).unwrap();
        while let Some(chunk) = set.take(&mut place) {
            log.release(&chunk).unwrap();
            all.extend(chunk.runs().into_iter().flat_map(|(start, len)| start / PAGE..(start + len) / PAGE));
        }
        all
    };
    collect(&mut log);
    for _ in 0..2 {
        run(&map, &mut vcpu);
        let pages = collect(&mut log);
        assert!(pages.contains(&4) && pages.contains(&written), "{pages:?}");
        assert!(collect(&mut log).is_empty(), "nothing runs");
    }
    // Unplugged memory has no dirty pages, and plugged memory is logged.
    part(1, 0);
    assert!(collect(&mut log).is_empty());
    part(1, PART);
    part(3, PART);
    collect(&mut log);
    run(&map, &mut vcpu);
    assert!(collect(&mut log).contains(&written));
    drop(log);
    assert!(vm.written(&vm.ram()[0]).is_err(), "KVM keeps no log");
    part(2, PART);
    assert!(vm.written(&vm.ram()[2]).is_err(), "nor of a slot that came later");
}
