//! Memory that a switch takes before it is used. The allocator counts, so this is the only test of its process.

#![expect(clippy::unwrap_used, reason = "what a test needs and lacks fails it")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use virtio_devices::{
    GuestMap, Interrupts, Memory, Net, NetSpec, Start, Switch, SwitchMode, SwitchSpec, VirtioDevice, Worker,
};
use vm_memory::GuestAddress;

/// Bytes that are allocated now, and the most that were at once.
static NOW: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

/// The system's, with a count.
struct Counting;

// SAFETY: every call goes to the system's allocator with the same arguments, and its answer is returned.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let now = NOW.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        MOST.fetch_max(now, Ordering::Relaxed);
        // SAFETY: the caller's promises are those that the system's allocator needs.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn switch(ports: u16) -> Switch {
    let (id, mode) = ("pf0".into(), SwitchMode::Veb);
    Switch::new(SwitchSpec { id, mode, ports, workers: 2, uplink: None, uplink_rate: None }).unwrap()
}

/// Bytes of a switch with so many ports, and the most that making it took.
fn cost(ports: u16) -> (usize, usize) {
    let before = NOW.load(Ordering::Relaxed);
    MOST.store(before, Ordering::Relaxed);
    let switch = switch(ports);
    let cost = (NOW.load(Ordering::Relaxed) - before, MOST.load(Ordering::Relaxed) - before);
    drop(switch);
    cost
}

fn threads() -> usize {
    fs::read_dir("/proc/self/task").unwrap().count()
}

#[test]
fn a_reserved_port_costs_less_than_1_kib_and_no_thread() {
    let before = threads();
    cost(1);
    let ((small, _), (large, most)) = (cost(1), cost(1025));
    println!("{} bytes a port, {} while the switch is made", (large - small) / 1024, (most - small) / 1024);
    assert!(large > small, "nothing was counted");
    assert!(large - small <= 1024 << 10, "{small} {large}");
    assert!(most - small <= 1024 << 10, "{small} {most}");

    // The NICs of its VFs, as they are before the guest enables them.
    let switch = switch(1025);
    let allocated = NOW.load(Ordering::Relaxed);
    let mut nics: Vec<_> = (0..1025).map(|port| nic(&switch, port)).collect();
    println!("{} bytes a NIC", (NOW.load(Ordering::Relaxed) - allocated) / 1025);
    assert_eq!(threads(), before, "no thread before a driver runs");

    // As many as this process may have descriptors for.
    let memory = GuestMap::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
    let workers: Vec<_> = nics[..200].iter_mut().flat_map(|nic| started(nic, &memory)).collect();
    assert_eq!(workers.len(), 200);
    assert_eq!(threads(), before + 2, "the switch's workers, and no other");
    workers.into_iter().for_each(|worker| worker.stop().join().unwrap());
}

fn nic(switch: &Switch, port: u16) -> Net {
    let [high, low] = port.to_be_bytes();
    let spec = NetSpec::new(&format!("pf0v{port}"), [2, 0, 0, 0, high, low]);
    Net::new(spec, switch.port(port).unwrap()).unwrap()
}

/// A driver that has enabled no queue.
fn started(nic: &mut Net, memory: &GuestMap) -> Vec<Worker> {
    let memory = Memory::new(memory.clone());
    let interrupts = Arc::new(Interrupts::new(3, 0));
    nic.start(Start { memory: memory.into(), features: 1 << 32, queues: Vec::new(), interrupts, log: None }).unwrap()
}
