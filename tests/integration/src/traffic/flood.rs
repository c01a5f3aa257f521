//! Traffic that keeps flowing through a NIC in both directions during a test.

use std::net::{SocketAddrV4, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::guest::Guest;
use crate::guest::sriov::Vf;
use crate::host::tap::{HostTap, Subnet};

/// The number of datagrams that the host sends at a time, and the pause between. The lab's machine emulates one
/// processor, which the guest shares: ten times as many datagrams would use all of it.
const BURST: usize = 4;
const PAUSE: Duration = Duration::from_millis(40);
/// The port that the datagrams are sent to. No program listens there.
const DISCARD: u16 = 9;
/// Number of frames that must pass in each direction before traffic counts as flowing.
const ENOUGH: u64 = 50;
/// Time limit for that.
const FLOW_LIMIT: Duration = Duration::from_secs(60);

/// Traffic through one of a guest's NICs: adaptive pings from the guest, and datagrams from the host. The guest stops
/// when the NIC's netdev disappears, the host when this is dropped.
pub struct Flood {
    stop: Arc<AtomicBool>,
    sender: Option<JoinHandle<()>>,
}

impl Flood {
    /// Gives `interface` and `tap` their addresses in `subnet`, and waits until traffic flows between them.
    pub fn start(guest: &mut Guest, interface: &str, tap: &HostTap, subnet: Subnet) -> Flood {
        tap.join(subnet);
        guest.join(interface, subnet);
        guest.ping(interface, subnet);
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let sender = thread::spawn(move || {
            let socket = UdpSocket::bind(SocketAddrV4::new(subnet.host(), 0)).expect("the tap has this address");
            let target = SocketAddrV4::new(subnet.guest(), DISCARD);
            while !stopped.load(Ordering::Relaxed) {
                for _ in 0..BURST {
                    // Datagrams that the NIC cannot accept in time are lost, as on a wire.
                    let _ = socket.send_to(&[0; 1000], target);
                }
                thread::sleep(PAUSE);
            }
        });
        let flood = Flood { stop, sender: Some(sender) };
        // A new netdev may reuse a name, but never an ifindex.
        let index = format!("/sys/class/net/{interface}/ifindex");
        guest.ok(&format!(
            "read -r own < {index}; (while read -r now < {index} && [ $now = $own ]; do \
             ping -A -q -c 1000 -s 1000 -I {interface} {}; usleep 50000; done) > /dev/null 2>&1 &",
            subnet.host()
        ));
        wait_until_it_flows(tap);
        flood
    }

    /// Starts traffic through each VF: VF i uses `taps[i]` and subnet i.
    pub fn through(guest: &mut Guest, vfs: &[Vf], taps: &[HostTap]) -> Vec<Flood> {
        let vfs = vfs.iter();
        vfs.map(|vf| Flood::start(guest, vf.interface(), &taps[vf.index], Subnet(vf.index as u8))).collect()
    }
}

impl Drop for Flood {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(sender) = self.sender.take() {
            let _ = sender.join();
        }
    }
}

fn wait_until_it_flows(tap: &HostTap) {
    let (before, deadline) = (tap.counters(), Instant::now() + FLOW_LIMIT);
    loop {
        let now = tap.counters();
        if now.from_guest >= before.from_guest + ENOUGH && now.to_guest >= before.to_guest + ENOUGH {
            return;
        }
        assert!(Instant::now() < deadline, "traffic does not flow through {}: {before:?}, then {now:?}", tap.name());
        thread::sleep(Duration::from_millis(20));
    }
}
