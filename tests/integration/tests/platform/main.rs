//! The PC that a guest boots, reboots and suspends on: CPUs, timers, segments and the hypervisor that it sees.

mod boot;
mod cpus;
mod hibernation;
mod hyperv;
mod legacy;
mod numa;
mod restarts;
mod segments;
mod timers;
