//! VFs of an X550 that are enabled and disabled: the time until the guest's driver has, or has given up, all of them.

use integration::{Guest, GuestSpec, Kernel, Pf};

use crate::IDLE;
use crate::figures::Spread;

/// The most VFs of an X550.
const ALL: usize = 63;
/// The NIC.
const NET: &str = "id=pf0,model=x550,mac=52:54:00:00:00:01,sriov_vfs=63";

/// Enables and disables all VFs `runs` times, after one time that loads what the driver needs.
pub(crate) fn measure(what: &str, runs: usize) {
    let spec = GuestSpec::new(Kernel::V6_12).with_modules().memory("size=512M").net(NET);
    let mut guest = Guest::boot(spec.kernel_argument("tsc=reliable"));
    guest.load_x550();
    let pf = Pf::find(&mut guest);
    guest.ok("ip link set eth0 up");
    guest.wait_for(IDLE);
    let (mut enabled, mut disabled) = (Vec::new(), Vec::new());
    for run in 0..=runs {
        let took = [ALL, 0].map(|count| {
            let took = time_of(&mut guest, &format!("echo {count} > {}", pf.file("sriov_numvfs")));
            let bound = guest.ok(&format!("ls -d {} 2> /dev/null | wc -l", pf.file("virtfn*/net/*")));
            assert_eq!(bound.trim(), count.to_string());
            took
        });
        if run > 0 {
            enabled.push(took[0]);
            disabled.push(took[1]);
        }
    }
    println!("| {what} | {ALL} VFs enabled and bound, s | {} | |", Spread::of(enabled));
    println!("| {what} | {ALL} VFs disabled, s | {} | |", Spread::of(disabled));
    guest.power_off();
}

/// The time of a shell command by the guest's clock, in s. The clock counts hundredths.
fn time_of(guest: &mut Guest, command: &str) -> f64 {
    let uptime = "read now rest < /proc/uptime; echo $now";
    let told = guest.ok_within(&format!("{uptime}; {command} && {uptime}"), std::time::Duration::from_secs(600));
    let times: Vec<f64> = told.lines().map(|line| line.parse().unwrap()).collect();
    times[1] - times[0]
}
