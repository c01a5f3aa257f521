//! The counts that must not grow while devices are added and removed, as rows of a table.

use crate::measure::kvm_trace::{KvmObjects, KvmTrace};
use crate::measure::usage::Usage;
use crate::vmm::Vmm;

/// The host resources and KVM objects of a VMM at one time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    usage: Usage,
    objects: KvmObjects,
}

impl Sample {
    /// Takes a sample of `vmm`, whose VM is the only one in `trace`.
    pub fn of(vmm: &Vmm, trace: &mut KvmTrace) -> Sample {
        Sample { usage: Usage::of(vmm), objects: trace.objects() }
    }

    /// Prints the table's heading, which starts with `what`.
    pub fn print_heading(what: &str) {
        println!("| {what} | files | threads | ioeventfds | irqfds | routes | slots | resident |");
        println!("|---|---|---|---|---|---|---|---|");
    }

    /// Prints a row called `what`, with the VMM's resident memory in MB.
    pub fn print(&self, what: &str, resident: f64) {
        let Sample { usage: Usage { files, threads }, objects } = self;
        let KvmObjects { ioeventfds, irqfds, routes, slots } = objects;
        println!("| {what} | {files} | {threads} | {ioeventfds} | {irqfds} | {routes} | {slots} | {resident:.2} MB |");
    }
}
