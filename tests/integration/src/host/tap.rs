//! The host's side of a NIC: a tap with an address that the guest can ping, and with frame counters.

use std::fs;
use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

/// Seconds for which Linux trusts a neighbour's address before it probes it: longer than any test, since a probe could
/// be mistaken for a misrouted frame.
pub(crate) const NEIGHBOUR_DELAY: u32 = 600;

/// Time that a neighbour may take to answer. Linux sends three requests, a second apart.
const NEIGHBOUR_WAIT: Duration = Duration::from_secs(5);

/// The private network between a tap and the guest's NIC: `10.77.<number>.0/24`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Subnet(pub u8);

impl Subnet {
    /// The tap's address.
    pub fn host(self) -> Ipv4Addr {
        Ipv4Addr::new(10, 77, self.0, 1)
    }

    /// The guest's address.
    pub fn guest(self) -> Ipv4Addr {
        Ipv4Addr::new(10, 77, self.0, 2)
    }
}

/// The queue mode of a tap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Queues {
    /// A single queue, without multi-queue mode.
    Single,
    /// Multi-queue mode, with one queue per opened descriptor.
    Multiple,
}

/// Frames that passed a tap, by the host's counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Frames that the guest sent.
    pub from_guest: u64,
    /// Frames that the host sent to the guest.
    pub to_guest: u64,
}

/// A tap interface on the host.
#[derive(Debug)]
pub struct HostTap {
    name: String,
    keeper: Keeper,
}

/// Object that keeps a tap alive.
#[derive(Debug)]
enum Keeper {
    /// Another process has the tap open.
    Other,
    /// The kernel: the tap is persistent, and removed when this is dropped.
    Kernel,
    /// The test has the tap open.
    Test { _queue: OwnedFd },
}

impl HostTap {
    /// The tap `name`, which the VMM has created.
    pub fn existing(name: &str) -> HostTap {
        assert!(interface_exists(name), "the VMM has not created the tap {name}");
        HostTap { name: name.into(), keeper: Keeper::Other }
    }

    /// Creates a persistent tap, which exists before the VMM starts and after it ends, until this is dropped.
    pub fn persistent(name: &str) -> HostTap {
        let fd = open_queue(name, Queues::Single);
        set_persistent(&fd, true);
        // The VMM cannot open the only queue while it is open here.
        drop(fd);
        HostTap { name: name.into(), keeper: Keeper::Kernel }
    }

    /// Creates a tap and holds its only queue, so that no program can open it.
    pub fn busy(name: &str) -> HostTap {
        HostTap { name: name.into(), keeper: Keeper::Test { _queue: open_queue(name, Queues::Single) } }
    }

    /// Name of the tap.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Gives the tap its address in `subnet` and brings it up.
    pub fn join(&self, subnet: Subnet) {
        self.join_at(subnet.host());
    }

    /// Gives the tap this address in a network of 24 bits, and brings it up.
    pub fn join_at(&self, address: Ipv4Addr) {
        // With IPv6 off, the host sends no frames of its own.
        let knob = format!("/proc/sys/net/ipv6/conf/{}/disable_ipv6", self.name);
        if Path::new(&knob).exists() {
            fs::write(&knob, "1").expect("IPv6 can be switched off on a tap");
        }
        let delay = format!("/proc/sys/net/ipv4/neigh/{}/delay_first_probe_time", self.name);
        fs::write(&delay, NEIGHBOUR_DELAY.to_string()).unwrap_or_else(|error| panic!("{delay}: {error}"));
        let socket = datagram_socket();
        let mut request = self.request();
        request.ifr_ifru.ifru_addr = socket_address(address);
        ioctl(&socket, libc::SIOCSIFADDR, &mut request).expect("a tap accepts an address");
        request.ifr_ifru.ifru_addr = socket_address(Ipv4Addr::new(255, 255, 255, 0));
        ioctl(&socket, libc::SIOCSIFNETMASK, &mut request).expect("a tap accepts a netmask");
        request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as i16;
        ioctl(&socket, libc::SIOCSIFFLAGS, &mut request).expect("a tap can be brought up");
    }

    /// True if the host finds the neighbour `address` behind the tap with a broadcast.
    pub fn reaches(&self, address: &str) -> bool {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).expect("a host has sockets");
        // The discard port. The datagram waits for the neighbour's reply.
        socket.send_to(&[0], (address, 9)).unwrap_or_else(|error| panic!("{address}: {error}"));
        let began = Instant::now();
        while began.elapsed() < NEIGHBOUR_WAIT {
            let table = fs::read_to_string("/proc/net/arp").expect("Linux has a table of neighbours");
            // Address, type, flags (0x2: complete), hardware address, mask, device.
            let is_found = |line: &str| {
                let words: Vec<_> = line.split_whitespace().collect();
                words.first() == Some(&address) && words.get(2) == Some(&"0x2") && words.last() == Some(&self.name())
            };
            if table.lines().any(is_found) {
                return true;
            }
            thread::sleep(Duration::from_millis(50));
        }
        false
    }

    /// The frames so far.
    pub fn counters(&self) -> Counters {
        let count = |file: &str| -> u64 {
            let path = format!("/sys/class/net/{}/statistics/{file}", self.name);
            fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}")).trim().parse().unwrap()
        };
        Counters { from_guest: count("rx_packets"), to_guest: count("tx_packets") }
    }

    /// Opens `count` queues of a tap with virtio-net headers, like a launcher that passes them to the VMM.
    pub fn open_queues(name: &str, count: usize) -> (HostTap, Vec<OwnedFd>) {
        let mode = if count > 1 { Queues::Multiple } else { Queues::Single };
        let queues = (0..count).map(|_| open_queue(name, mode)).collect();
        (HostTap { name: name.into(), keeper: Keeper::Other }, queues)
    }

    fn request(&self) -> libc::ifreq {
        interface_request(&self.name)
    }
}

impl Drop for HostTap {
    fn drop(&mut self) {
        if let Keeper::Kernel = self.keeper {
            set_persistent(&open_queue(&self.name, Queues::Single), false);
        }
    }
}

/// True if the host has a network interface of that name.
pub fn interface_exists(name: &str) -> bool {
    Path::new("/sys/class/net").join(name).exists()
}

fn open_queue(name: &str, queues: Queues) -> OwnedFd {
    // SAFETY: the path is a literal with a NUL.
    let fd = unsafe { libc::open(c"/dev/net/tun".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC | libc::O_NONBLOCK) };
    assert!(fd >= 0, "/dev/net/tun: {}", std::io::Error::last_os_error());
    // SAFETY: the descriptor was just opened and has no other owner.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    let mut request = interface_request(name);
    let multiple = if queues == Queues::Multiple { libc::IFF_MULTI_QUEUE } else { 0 };
    request.ifr_ifru.ifru_flags = (libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR | multiple) as i16;
    ioctl(&fd, libc::TUNSETIFF, &mut request).unwrap_or_else(|error| panic!("creating the tap {name}: {error}"));
    fd
}

fn set_persistent(fd: &OwnedFd, on: bool) {
    // SAFETY: TUNSETPERSIST takes a plain number.
    let done = unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNSETPERSIST as libc::Ioctl, libc::c_ulong::from(on)) };
    assert_eq!(done, 0, "TUNSETPERSIST: {}", std::io::Error::last_os_error());
}

fn interface_request(name: &str) -> libc::ifreq {
    assert!(name.len() < libc::IFNAMSIZ, "an interface's name is at most 15 bytes");
    // SAFETY: ifreq is plain data for which zero is valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (target, byte) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *target = byte as libc::c_char;
    }
    request
}

fn socket_address(address: Ipv4Addr) -> libc::sockaddr {
    let address = libc::sockaddr_in {
        sin_family: libc::AF_INET as libc::sa_family_t,
        sin_port: 0,
        sin_addr: libc::in_addr { s_addr: u32::from(address).to_be() },
        sin_zero: [0; 8],
    };
    // SAFETY: both are plain data of 16 bytes; an ifreq carries a sockaddr_in as a sockaddr.
    unsafe { std::mem::transmute(address) }
}

fn datagram_socket() -> OwnedFd {
    // SAFETY: socket has no memory effects.
    let fd: RawFd = unsafe { libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
    assert!(fd >= 0, "opening a socket: {}", std::io::Error::last_os_error());
    // SAFETY: the descriptor was just opened and has no other owner.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

fn ioctl(fd: &OwnedFd, request: libc::Ioctl, argument: &mut libc::ifreq) -> std::io::Result<()> {
    // SAFETY: every request passed here reads or writes one ifreq.
    let done = unsafe { libc::ioctl(fd.as_raw_fd(), request, std::ptr::from_mut(argument)) };
    if done < 0 { Err(std::io::Error::last_os_error()) } else { Ok(()) }
}
