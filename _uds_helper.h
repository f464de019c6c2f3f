/*
 * afxdpd's C helper: bpf(2), XDP links, SEQPACKET messages with file descriptors, busy polling.
 *
 * The rules for every function here:
 *   - it returns 0 or a positive result, or -errno;
 *   - file descriptors passed in are borrowed, file descriptors returned are the caller's and close-on-exec;
 *   - it never blocks on a socket, allocates nothing, logs nothing and decides nothing.
 *
 * This file is read by the C compiler and by cffi, so it has declarations only: no preprocessor lines.
 */

/* What the kernel holds behind an XDP link. ifindex is 0 once the device is gone. */
struct uds_link_info {
    unsigned int id;
    unsigned int prog_id;
    unsigned int ifindex;
};

/* Creates an XSKMAP with room for queues 0 … entries - 1; returns its fd. name: at most 15 characters of
 * [A-Za-z0-9_.]. Linux 4.18. */
int uds_xskmap_create(const char *name, unsigned int entries);

/* Loads the program that redirects each packet into the map at its receive queue's index, or passes it to the
 * stack where that entry is empty; returns its fd. Linux 5.3 (with multi-buffer packets from 5.18). */
int uds_redirect_prog_load(int xskmap_fd, const char *name);

/* Attaches a program to a device of the caller's network namespace and returns the link's fd: in the driver
 * (native) or, with generic != 0, in the stack. Closing the last fd of an unpinned link detaches.
 * -EINVAL: no such device (or no such program). -EBUSY, in the other mode -EEXIST: it has a program already.
 * -EOPNOTSUPP: its driver has no native mode. Linux 5.9. */
int uds_xdp_link_create(int prog_fd, unsigned int ifindex, int generic);

/* Puts another program behind the link, in one step, wherever its device is. -ENOLINK: the device is gone.
 * Linux 5.9. */
int uds_link_update(int link_fd, int new_prog_fd);

/* What is behind the link. -EINVAL: not an XDP link. Linux 5.9. */
int uds_link_query(int link_fd, struct uds_link_info *info);

/* Returns the number of entries and, in *id, the id of the map. -EINVAL: not an XSKMAP. */
int uds_xskmap_query(int map_fd, unsigned int *id);

/* Pins an object on a BPF file system: it then lives without any fd. -EEXIST: the path is taken. -EPERM: not a BPF
 * file system, or a dot in the name. Removing the last pin of a link that nobody has open detaches some time later;
 * to know when, open it first, remove the pin, then close it. */
int uds_obj_pin(int fd, const char *path);

/* Opens a pinned object. */
int uds_obj_get(const char *path);

/*
 * Receives one packet of a SOCK_SEQPACKET socket that has SO_PASSCRED from its listening socket: set after accept(),
 * it would come too late for a packet sent in between, which then has pid 0 and uid 65534.
 *
 * Returns the number of bytes in buffer (what is beyond size is lost, *flags tells), or -EAGAIN, or -errno: -ECONNRESET
 * comes once, before what else there is to read, where the peer has closed with packets of ours unread.
 *   fds, max_fds   the first max_fds received file descriptors, the caller's to close; further ones are closed here
 *   n_fds          how many arrived in all that the kernel could hand over: it may be more than max_fds
 *   pid, uid       of the sender, as the kernel vouches for them; 0 and the largest number where there is none
 *   flags          bits: 1 end of file (the peer has closed: no packet), 2 the packet was cut
 */
int uds_recv(int sock, char *buffer, unsigned int size, int *fds, unsigned int max_fds, unsigned int *n_fds,
             int *pid, unsigned int *uid, int *flags);

/* Sends one packet, with a file descriptor where fd >= 0. 0, -EAGAIN where the peer does not read, -EPIPE where it has
 * closed, or -errno; never a signal. */
int uds_send(int sock, const char *buffer, unsigned int size, int fd);

/* Sets SO_PREFER_BUSY_POLL, SO_BUSY_POLL and SO_BUSY_POLL_BUDGET of an AF_XDP socket, all or none of them:
 * where one is refused, those already set get their former values back. -ENOTSOCK, -EAFNOSUPPORT (not AF_XDP),
 * -EINVAL, -EPERM. Linux 5.11. */
int uds_busy_poll(int xsk, int timeout_us, int budget);
