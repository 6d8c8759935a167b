package plot

import (
	"fmt"
	"strings"
)

// theme has the colors of a picture.
type theme struct {
	ground, text, faint, grid string
	lines                     [Colors]string
}

var (
	light = theme{"#ffffff", "#24292f", "#57606a", "#d8dee4", [Colors]string{"#0969da", "#bc4c00", "#1a7f37", "#8250df", "#9a6700", "#bf3989", "#1b7c83", "#57606a"}}
	dark  = theme{"#0d1117", "#e6edf3", "#9198a1", "#30363d", [Colors]string{"#58a6ff", "#f0883e", "#3fb950", "#bc8cff", "#d9b44a", "#f778ba", "#39c5cf", "#9198a1"}}
)

// style has no variables, since few programs but browsers know them: those
// show the light picture.
func style() string {
	return `<style>
text { font-family: system-ui, "Segoe UI", Helvetica, Arial, sans-serif; font-size: 12px; }
.title { font-size: 16px; font-weight: 600; }
.grid { stroke-width: 1; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; }
.dash { stroke-dasharray: 5 4; }
.bar { fill: none; stroke-width: 1; }
` + light.rules() + "@media (prefers-color-scheme: dark) {\n" + dark.rules() + "}\n</style>\n"
}

func (t theme) rules() string {
	var b strings.Builder
	fmt.Fprintf(&b, "text { fill: %s; }\n.faint { fill: %s; }\n.ground { fill: %s; }\n.grid { stroke: %s; }\n.dot { stroke: %s; }\n",
		t.text, t.faint, t.ground, t.grid, t.ground)
	for i, c := range t.lines {
		fmt.Fprintf(&b, ".line.c%d, .bar.c%d { stroke: %s; }\n.dot.c%d { fill: %s; }\n", i, i, c, i, c)
	}
	return b.String()
}
