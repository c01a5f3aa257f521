//! A guest with a VF of the host's NIC: the time that it takes to start, and its VMM's memory.

use integration::{Guest, GuestSpec, HostNic, Kernel, resident};

use crate::figures::Spread;

/// The guest's memory.
const MEMORY: (&str, u64) = ("size=320M", 320 << 10);

/// Starts such a guest `runs` times, after one start that warms the page cache, and pings the host through its VF.
pub(crate) fn measure(what: &str, runs: usize) {
    let vf = HostNic::igb_vfs().swap_remove(0);
    let (mut starts, mut memory) = (Vec::new(), Vec::new());
    for run in 0..=runs {
        let spec = GuestSpec::new(Kernel::V6_12).memory(MEMORY.0).arguments(&["--device", &vf.option("")]);
        let mut guest = Guest::boot(spec);
        let took = guest.vmm().started().elapsed().as_secs_f64();
        vf.join(&mut guest, "eth0");
        if run > 0 {
            starts.push(took);
            memory.push(resident(guest.vmm(), MEMORY.1));
        }
        guest.power_off();
    }
    println!("| {what} | start, s | {} | |", Spread::of(starts));
    println!("| {what} | resident without the guest's memory, MB | {} | |", Spread::of(memory));
}
