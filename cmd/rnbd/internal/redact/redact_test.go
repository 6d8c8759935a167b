package redact

import (
	"strings"
	"testing"
)

const secret = "c2VjcmV0LW9mLXRoZS10ZXN0"

func TestTextHasNoSecrets(t *testing.T) {
	for _, in := range []string{
		"psk=" + secret,
		"tls-psk: " + secret,
		"PASSWORD = \"" + secret + "\"",
		`{"private_key":"` + secret + `","a":1}`,
		`{"token": "a \"` + secret + `\" b"}`,
		"level=INFO msg=x auth_key=" + secret + " next=1",
		"http://user:" + secret + "@host/path",
		"Authorization: Bearer " + secret,
		"-----BEGIN EC PRIVATE KEY-----\n" + secret + "\n-----END EC PRIVATE KEY-----",
		"-----BEGIN PRIVATE KEY-----\n" + secret + " and the end is missing",
		"web1:" + strings.Repeat("0123456789abcdef", 4),
		"io-config: fileio:secret=" + secret,
		"--tls-key " + "x key=" + secret,
	} {
		out := string(Text([]byte(in)))
		if strings.Contains(out, secret) || strings.Contains(out, "0123456789abcdef0123") || !strings.Contains(out, Removed) {
			t.Errorf("%q becomes %q", in, out)
		}
	}
}

func TestTextKeepsTheRest(t *testing.T) {
	for _, in := range []string{
		"device=rnbd0 state=open err=\"no such file\"",
		"tls-key: /etc/rnbd/tls/server.key",
		"always_invalidate changes keys: fine",
		"rnbd_client_path_connected{session=\"s\",path=\"1\"} 1",
		"monkey: banana",
	} {
		if out := string(Text([]byte(in))); out != in {
			t.Errorf("%q becomes %q", in, out)
		}
	}
}

func TestYAMLHasNoSecrets(t *testing.T) {
	in := `
# the psk is ` + secret + `
listen: [10.0.0.1:1234] # ` + secret + `
psk: ` + secret + `
psk-keys:
  - ` + secret + `
password: |
  first
  ` + secret + `
plugin:
  token: {a: ` + secret + `}
tls-key: /etc/rnbd/server.key
io-config:
  - fileio:secret=` + secret + `
`
	out := string(YAML([]byte(in)))
	if strings.Contains(out, secret) || strings.Contains(out, "first") {
		t.Errorf("it is\n%s", out)
	}
	for _, kept := range []string{"10.0.0.1:1234", "/etc/rnbd/server.key", "fileio"} {
		if !strings.Contains(out, kept) {
			t.Errorf("%s is gone:\n%s", kept, out)
		}
	}
	if out := string(YAML([]byte("psk: [" + secret))); strings.Contains(out, secret) {
		t.Errorf("a broken file is kept: %s", out)
	}
}

func FuzzYAML(f *testing.F) {
	f.Add("psk: " + secret)
	f.Add("a: {password: [x, " + secret + "]}")
	f.Fuzz(func(t *testing.T, in string) {
		if out := YAML([]byte("psk: " + secret + "\n" + in)); strings.Contains(string(out), "psk: "+secret) {
			t.Errorf("%q becomes %q", in, out)
		}
		Text([]byte(in))
	})
}
