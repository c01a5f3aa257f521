//! The VMM restores the settings of the terminal in which it was started.

use std::time::Duration;

use integration::{GuestSpec, Kernel, Terminal, VmmCommand};

const LIMIT: Duration = Duration::from_secs(20);

fn guest() -> VmmCommand {
    GuestSpec::new(Kernel::V6_12).command()
}

#[test]
fn the_terminal_is_raw_for_the_guest_and_restored_after_it() {
    let terminal = Terminal::new();
    let before = terminal.settings();
    let vmm = terminal.spawn(guest());
    terminal.wait_for("@@ready");
    assert!(!terminal.is_canonical(), "each key goes to the guest at once");
    terminal.send("1 poweroff -f\n");
    assert_eq!(vmm.wait(LIMIT).code, Some(0));
    assert_eq!(terminal.settings(), before);
}

#[test]
fn the_terminal_is_restored_when_the_vmm_is_terminated() {
    let terminal = Terminal::new();
    let before = terminal.settings();
    let vmm = terminal.spawn(guest());
    terminal.wait_for("@@ready");
    vmm.signal(15);
    vmm.wait(LIMIT);
    assert_eq!(terminal.settings(), before);
}

#[test]
fn the_terminal_is_restored_when_the_vmm_cannot_start() {
    let terminal = Terminal::new();
    let before = terminal.settings();
    let vmm = terminal.spawn(guest().args(["--net", "tap=a-name-that-is-too-long"]));
    assert_ne!(vmm.wait(LIMIT).code, Some(0));
    assert_eq!(terminal.settings(), before);
}
