//! The report on a guest that does not answer.

#![expect(clippy::expect_used, clippy::panic, reason = "a test fails by panicking, also in its helpers")]

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::Duration;

use integration::{Api, Guest, GuestSpec, Kernel, record_exits};

/// The report on `guest`, which does not reply to `command` within a second.
fn report_on(guest: &mut Guest, command: &str) -> String {
    let silent = catch_unwind(AssertUnwindSafe(|| guest.run_within(command, Duration::from_secs(1))));
    let report = silent.expect_err("the guest is silent");
    report.downcast_ref::<String>().expect("a panic with a text").clone()
}

/// Checks that `report` has all of `parts`, in this order.
fn assert_has_in_order(report: &str, parts: &[&str]) {
    let mut rest = report;
    for part in parts {
        let Some((_, after)) = rest.split_once(part) else { panic!("{part:?} is not in its place in {report}") };
        rest = after;
    }
}

#[test]
fn a_silent_guest_is_described_and_its_vcpus_entered_again() {
    record_exits();
    let api = Api::new("silent");
    let spec = GuestSpec::new(Kernel::V6_12).arguments(&["--api-socket", &api.argument()]);
    let mut guest = Guest::boot(spec);
    guest.vmm().signal(libc::SIGSTOP);
    let report = report_on(&mut guest, "echo awake");
    let (stopped, running) = report.split_once("=== after").expect("two parts");
    let parts = ["vcpu0) T", "/exits: ", "GET vm.counters: no answer", "kvm_exit", "interrupts", "kernel log:\n["];
    assert_has_in_order(stopped, &parts);
    assert_has_in_order(running, &["/exits: ", "__serial", "line_status", " 0 untouched"]);
    assert!(!report.contains(" 0 after its vCPUs entered it again"), "{report}");
    assert!(report.contains(" 0 after an NMI"), "{report}");
    let trace = trace_of(&report);
    let text = fs::read_to_string(trace).unwrap_or_else(|error| panic!("{}: {error}", trace.display()));
    assert!(text.lines().filter(|line| line.contains("kvm_exit")).count() > 200, "{} bytes", text.len());
    // The guest's read from its serial port.
    assert!(text.contains("kvm_pio: pio_read at 0x3f8"), "{} bytes", text.len());
    fs::remove_file(trace).expect("the trace can be removed");
    assert_eq!(guest.ok("echo $((6 * 7))"), "42");
}

/// Path of the whole trace that belongs to a report.
fn trace_of(report: &str) -> &Path {
    let path = report.lines().skip_while(|line| *line != "--- the whole trace is in:").nth(1);
    Path::new(path.expect("the trace's path"))
}

#[test]
fn a_guest_that_stays_silent_shows_its_backtrace_after_an_nmi() {
    let api = Api::new("backtrace");
    let spec = GuestSpec::new(Kernel::V6_12).arguments(&["--api-socket", &api.argument()]);
    let mut guest = Guest::boot(spec);
    let report = report_on(&mut guest, "sleep 600");
    let parts =
        ["Kernel panic - not syncing: NMI", "Call Trace", "an NMI was sent:\n204", " 0 untouched", " 0 after a key"];
    assert_has_in_order(&report, &parts);
    assert!(!report.contains(" 0 after an NMI"), "{report}");
    fs::remove_file(trace_of(&report)).expect("the trace can be removed");
}
