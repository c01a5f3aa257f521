//! Paced pings through a guest's VFs, with the number of replies.

use crate::guest::Guest;
use crate::guest::sriov::Vf;
use crate::host::tap::Subnet;

/// Pings from the guest to the host through some VFs, until they are ended.
pub struct Pings {
    vfs: Vec<usize>,
}

impl Pings {
    /// Starts pings through each VF, `bytes` bytes long and `interval` seconds apart. VF i has joined subnet i.
    pub fn start(guest: &mut Guest, vfs: &[Vf], bytes: usize, interval: f64) -> Pings {
        for vf in vfs {
            let (interface, index, host) = (vf.interface(), vf.index, Subnet(vf.index as u8).host());
            let options = format!("-q -s {bytes} -i {interval}");
            guest.ok(&format!("ping {options} -I {interface} {host} > /tmp/pings{index} 2>&1 &"));
        }
        Pings { vfs: vfs.iter().map(|vf| vf.index).collect() }
    }

    /// Stops the pings. Returns the numbers sent and answered for each VF.
    pub fn end(self, guest: &mut Guest) -> Vec<(u64, u64)> {
        guest.ok("killall -INT ping");
        let count = |index: usize| {
            guest.wait_for(&format!("grep -q transmitted /tmp/pings{index}"));
            let text = guest.ok(&format!("grep transmitted /tmp/pings{index}"));
            let mut numbers = text.split(|c: char| !c.is_ascii_digit()).filter_map(|number| number.parse().ok());
            let (Some(sent), Some(answered)) = (numbers.next(), numbers.next()) else {
                panic!("no counts of pings in {text}")
            };
            (sent, answered)
        };
        self.vfs.into_iter().map(count).collect()
    }
}
