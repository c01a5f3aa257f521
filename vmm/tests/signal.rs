//! The signals that end a VM. They affect the whole process, so this is the only test in its binary.

mod common;

use common::{Code, Guest, wait_for};
use rustix::process::{Signal, getpid, kill_process};

#[test]
fn a_signal_stops_a_guest_that_spins() {
    // A shell without job control starts background processes with SIGINT ignored, and the VMM does not change that.
    // SAFETY: no handler has been set yet, and the default action runs no code of this process.
    unsafe { libc::signal(libc::SIGINT, libc::SIG_DFL) };
    for signal in [Signal::TERM, Signal::INT] {
        let guest = Guest::new(&Code::default().print("up").spin()).with_vcpus(2);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                wait_for(&guest.path("serial"), "up");
                kill_process(getpid(), signal).unwrap();
            });
            guest.run().unwrap();
        });
    }
}
