#!/bin/sh
# The init of the nested lab's first-level machine. The kernel's console is the first serial port. The second one carries commands,
# one per line, and their output. A line that starts with a record separator comes from this script. An empty line only wakes the
# machine.

export PATH=/bin:/usr/bin:/usr/sbin HOME=/root TERM=dumb

# Programs that isolate themselves, such as passt, change their root, which is impossible from an initramfs.
if [ ! -e /switched ]; then
    mkdir /switched
    mount -t tmpfs -o mode=755 root /switched
    cp -a /bin /etc /init /modules /switched
    mkdir /switched/dev /switched/proc /switched/root /switched/run /switched/switched /switched/sys /switched/tmp
    mount -t devtmpfs dev /switched/dev
    exec switch_root /switched /init
fi

mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t tmpfs tmp /tmp
mkdir -p /dev/pts /dev/shm
mount -t devpts pts /dev/pts
mount -t tmpfs shm /dev/shm
for module in /modules/*; do
    insmod "$module" || echo "cannot load $module"
done
ip link set lo up

# The checkout has the same path here as outside, so that every path in a command means the same in both.
share=$(sed -n 's/.*lab\.share=\([^ ]*\).*/\1/p' /proc/cmdline)
mkdir -p "$share"
mount -t 9p -o trans=virtio,version=9p2000.L,msize=262144,cache=loose checkout "$share" || echo "cannot mount $share"

# Programs of other projects with their libraries, where something asked for them. Not by a link: DPDK loads nothing from a folder that
# anybody can write to, and the checkout may be in /tmp.
mkdir /usr
if [ -d "$share/target/lab/peers/usr" ]; then
    mount -o bind "$share/target/lab/peers/usr" /usr || echo "cannot mount target/lab/peers"
fi
ln -s usr/lib /lib
ln -s usr/lib64 /lib64
mkdir /var
ln -s ../run /var/run
printf '%s\n' root:x:0:0::/root:/bin/sh nobody:x:65534:65534::/:/bin/false > /etc/passwd
printf '%s\n' root:x:0: nogroup:x:65534: > /etc/group

cd "$share" || cd /

if grep -q lab.shell /proc/cmdline; then
    setsid cttyhack sh
    poweroff -f
fi

stty -F /dev/ttyS1 raw -echo
exec < /dev/ttyS1 > /dev/ttyS1 2>&1
printf '\036ready\n'
while read -r command; do
    [ -n "$command" ] || continue
    sh -c "$command" < /dev/null
    printf '\n\036exit %d\n' $?
done
poweroff -f
