//! The signals that end a VM. They are the whole process's: this is the only test of its binary.

mod common;

use common::{Code, Guest, wait_for};

#[test]
fn a_signal_stops_a_guest_that_spins() {
    for signal in [rustix::process::Signal::TERM, rustix::process::Signal::INT] {
        let guest = Guest::new(&Code::default().print("up").spin()).with_vcpus(2);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                wait_for(&guest.path("serial"), "up");
                rustix::process::kill_process(rustix::process::getpid(), signal).unwrap();
            });
            guest.run().unwrap();
        });
    }
}
